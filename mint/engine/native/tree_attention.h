// Attention over the packed rows of a tree, and its gradient: each node looks at the rows above it and at its own.
//
// A node's keys and values are gathered once for each key/value head, in the panels that products read; nothing else is
// laid out anew, and no row is padded. Scores, weights and what is seen are summed in the order of `attention.h`, so that
// training and sampling agree to the last bit.
#pragma once

#include <vector>

#include "matrix.h"
#include "rows.h"

constexpr int64_t QUERIES = 24;  // rows at a time: few, because those of a block are all given the keys of its last
// Rows of a node at most; a longer one is several, each below the one before, for several threads to have something to do.
constexpr int64_t NODE_ROWS = 20 * QUERIES;

struct HeadShape {
    int64_t heads, kv_heads, size;
    float scale;

    int64_t width() const { return (heads + 2 * kv_heads) * size; }  // of a row of q, k and v
    int64_t group() const { return heads / kv_heads; }
};

// A node's rows, the tokens before them, and the packed row of every token it looks at.
struct Node {
    int64_t first, length, depth;
    std::vector<int64_t> seen;

    int64_t keys() const { return depth + length; }
};

inline std::vector<Node> nodes_of(const int64_t* lengths, const int64_t* parents, int64_t count) {
    std::vector<Node> nodes;
    std::vector<size_t> ends(count);  // the last part of each node
    int64_t start = 0;
    for (int64_t n = 0; n < count; n++) {
        const Node* above = parents[n] >= 0 ? &nodes[ends[parents[n]]] : nullptr;
        for (int64_t done = 0; done < lengths[n]; done += NODE_ROWS) {
            Node node;
            if (above) node.seen = above->seen;
            node.first = start, node.length = std::min(NODE_ROWS, lengths[n] - done);
            node.depth = int64_t(node.seen.size());
            for (int64_t row = 0; row < node.length; row++) node.seen.push_back(start++);
            nodes.push_back(std::move(node));
            above = &nodes.back();
        }
        ends[n] = nodes.size() - 1;
    }
    return nodes;
}

// One head's columns of a node's keys or values, in the two orders that products read them in.
class Gathered {
public:
    // In panels of keys, input by input: for products that give a number for each key.
    void by_keys(const Node& node, const float* columns, int64_t stride, int64_t size) {
        size_ = size;
        numbers_.resize((node.keys() + PANEL - 1) / PANEL * PANEL * size);
        for (int64_t key = 0; key < node.keys(); key++) {
            const float* from = columns + node.seen[key] * stride;
            float* to = numbers_.data() + key / PANEL * PANEL * size + key % PANEL;
            for (int64_t d = 0; d < size; d++) to[d * PANEL] = from[d];
        }
    }

    // In panels of columns, key by key: for products that sum over the keys.
    void by_columns(const Node& node, const float* columns, int64_t stride, int64_t size) {
        size_ = size, keys_ = node.keys();
        numbers_.resize(padded_outputs(size) * keys_);
        for (int64_t first = 0; first < size; first += PANEL) {
            const int64_t count = std::min(PANEL, size - first), width = padded_outputs(count);
            float* to = numbers_.data() + first * keys_;
            for (int64_t key = 0; key < keys_; key++, to += width)
                std::memcpy(to, columns + node.seen[key] * stride + first, count * sizeof(float));
        }
    }

    // out[row, key - from] = x[row] . key, for the keys from..to-1; `from` begins a panel.
    void score(Rows x, int64_t rows, int64_t from, int64_t to, float* out, int64_t stride) const {
        for (int64_t key = from; key < to; key += PANEL)
            product(
                x, rows, numbers_.data() + key * size_, size_, nullptr, out + key - from, stride, false,
                std::min(PANEL, to - key), PANEL, size_
            );
    }

    // out[row] = the sum of the keys from..to-1, weighed by weight[row, key - from].
    void weigh(Rows weight, int64_t rows, int64_t from, int64_t to, float* out, int64_t stride) const {
        for (int64_t first = 0; first < size_; first += PANEL) {
            const int64_t count = std::min(PANEL, size_ - first), width = padded_outputs(count);
            const float* panel = numbers_.data() + first * keys_ + from * width;
            product(weight, rows, panel, to - from, nullptr, out + first, stride, false, count, width, to - from);
        }
    }

private:
    int64_t size_ = 0, keys_ = 0;
    std::vector<float> numbers_;
};

// Rows of a node that are computed together, and the keys they are given: those that any of them sees, from the start
// of a panel on.
struct Block {
    int64_t row, rows;    // packed
    int64_t position;     // of its first row
    int64_t from, to;     // keys
    int64_t window;

    int64_t low(int64_t n) const { return std::max<int64_t>(window ? position + n - window + 1 : 0, from) - from; }
    int64_t high(int64_t n) const { return position + n - from; }
};

// What it writes on its way, kept from one node to the next.
struct AttentionRoom {
    Gathered keys, values, key_columns, value_columns;
    std::vector<float> scores, slopes, grad_keys, grad_values;
};

// Of a key/value head and the query heads that share it.
class TreeAttention {
public:
    TreeAttention(HeadShape shape, int64_t window, int64_t head, AttentionRoom& room)
        : shape_(shape), window_(window), head_(head), room_(room) {}

    // `seen` [rows, heads * size] from turned `qkv`; `mass` [rows, heads] gets the log of what each softmax divides by.
    void forward(const Node& node, const float* qkv, float* seen, float* mass) {
        const int64_t size = shape_.size, width = shape_.width();
        room_.keys.by_keys(node, qkv + key_at(), width, size);
        room_.value_columns.by_columns(node, qkv + value_at(), width, size);
        by_blocks(node, [&](const Block& block, int64_t query) {
            float* scores = room_.scores.data();
            score(block, qkv + query * size, scores);
            for (int64_t n = 0; n < block.rows; n++)
                mass[(block.row + n) * shape_.heads + query] = soften(block, n, scores + n * stride_);
            room_.value_columns.weigh(
                {scores, stride_}, block.rows, block.from, block.to, seen + block.row * seen_width() + query * size,
                seen_width()
            );
        });
    }

    // Writes the gradient of the node's queries into `grad` (as wide as qkv, and zero before). Those of the keys and
    // values it looks at are kept for `add_gradients`.
    void backward(
        const Node& node, const float* qkv, const float* seen, const float* mass, const float* grad_seen, float* grad
    ) {
        const int64_t size = shape_.size, width = shape_.width(), padded = padded_outputs(size);
        room_.keys.by_keys(node, qkv + key_at(), width, size);
        room_.values.by_keys(node, qkv + value_at(), width, size);
        room_.key_columns.by_columns(node, qkv + key_at(), width, size);
        room_.grad_keys.assign(node.keys() * padded, 0.0f);
        room_.grad_values.assign(node.keys() * padded, 0.0f);
        by_blocks(node, [&](const Block& block, int64_t query) {
            if (all_zero(grad_seen + block.row * seen_width(), block.rows * seen_width())) return;
            const Rows q{qkv + block.row * width + query * size, width};
            const Rows given{grad_seen + block.row * seen_width() + query * size, seen_width()};
            float *weights = room_.scores.data(), *slopes = room_.slopes.data();
            score(block, qkv + query * size, weights);
            room_.values.score(given, block.rows, block.from, block.to, slopes, stride_);
            for (int64_t n = 0; n < block.rows; n++)
                soften_back(
                    block, n, mass[(block.row + n) * shape_.heads + query],
                    dot(given.start + n * given.stride, seen + (block.row + n) * seen_width() + query * size),
                    weights + n * stride_, slopes + n * stride_
                );
            const Rows by_weight{weights, stride_}, by_slope{slopes, stride_};
            room_.key_columns.weigh(
                by_slope, block.rows, block.from, block.to, grad + block.row * width + query * size, width
            );
            const int64_t keys = block.to - block.from;
            outer(by_slope, keys, q, size, block.rows, room_.grad_keys.data() + block.from * padded, padded);
            outer(by_weight, keys, given, size, block.rows, room_.grad_values.data() + block.from * padded, padded);
        });
    }

    void add_gradients(const Node& node, float* grad) const {
        const int64_t width = shape_.width(), padded = padded_outputs(shape_.size);
        for (int64_t key = 0; key < node.keys(); key++) {
            add(room_.grad_keys.data() + key * padded, grad + node.seen[key] * width + key_at());
            add(room_.grad_values.data() + key * padded, grad + node.seen[key] * width + value_at());
        }
    }

private:
    int64_t key_at() const { return (shape_.heads + head_) * shape_.size; }
    int64_t value_at() const { return (shape_.heads + shape_.kv_heads + head_) * shape_.size; }
    int64_t seen_width() const { return shape_.heads * shape_.size; }

    // For every block of the node's rows, each query head.
    template <typename Work>
    void by_blocks(const Node& node, const Work& work) {
        for (int64_t first = 0; first < node.length; first += QUERIES) {
            const int64_t rows = std::min(QUERIES, node.length - first), position = node.depth + first;
            const int64_t from = window_ ? std::max<int64_t>(0, position - window_ + 1) / PANEL * PANEL : 0;
            const Block block{node.first + first, rows, position, from, position + rows, window_};
            stride_ = padded_outputs(block.to - block.from);
            if (int64_t(room_.scores.size()) < QUERIES * stride_ + LANES) {
                room_.scores.resize(2 * QUERIES * stride_ + LANES);
                room_.slopes.resize(2 * QUERIES * stride_ + LANES);
            }
            for (int64_t query = head_ * shape_.group(); query < (head_ + 1) * shape_.group(); query++) work(block, query);
        }
    }

    void score(const Block& block, const float* q, float* scores) const {
        const Rows rows{q + block.row * shape_.width(), shape_.width()};
        room_.keys.score(rows, block.rows, block.from, block.to, scores, stride_);
    }

    // Scores become weights that add up to 1, and 0 for keys the row does not see; gives the log of their mass.
    float soften(const Block& block, int64_t n, float* scores) const {
        const Vector hidden = splat(-INF), scale = splat(shape_.scale);
        Vector most = hidden, sum = {};
        by_keys(block, n, [&](int64_t at, Integers visible) {
            const Vector x = visible ? load(scores + at) * scale : hidden;
            most = x > most ? x : most;
            store(scores + at, x);
        });
        const float peak = largest_of(most);
        by_keys(block, n, [&](int64_t at, Integers) {
            const Vector weight = exponential(load(scores + at) - splat(peak));
            store(scores + at, weight);
            sum += weight;
        });
        const float mass = sum_of(sum);
        const Vector share = splat(1.0f / mass);
        by_keys(block, n, [&](int64_t at, Integers) { store(scores + at, load(scores + at) * share); });
        return peak + std::log(mass);
    }

    // Scores become weights as above, and `slopes`, given as the weights' gradients, those of the unscaled scores.
    void soften_back(const Block& block, int64_t n, float mass, float mean, float* scores, float* slopes) const {
        const Vector none = {}, scale = splat(shape_.scale);
        by_keys(block, n, [&](int64_t at, Integers visible) {
            const Vector weight = visible ? exponential(load(scores + at) * scale - splat(mass)) : none;
            store(scores + at, weight);
            store(slopes + at, visible ? weight * (load(slopes + at) - splat(mean)) * scale : none);
        });
    }

    // Each vector of the block's keys, and which of them row n sees.
    template <typename Work>
    void by_keys(const Block& block, int64_t n, const Work& work) const {
        const Vector numbers = lane_numbers(), low = splat(float(block.low(n))), high = splat(float(block.high(n)));
        for (int64_t at = 0; at < block.to - block.from; at += LANES) {
            const Vector key = numbers + splat(float(at));
            work(at, (key >= low) & (key <= high));
        }
    }

    float dot(const float* a, const float* b) const {
        Vector sum = {};
        by_vectors(shape_.size, [&](int64_t i, int64_t n) { sum += load(a + i, n) * load(b + i, n); });
        return sum_of(sum);
    }

    void add(const float* from, float* to) const {
        by_vectors(shape_.size, [&](int64_t i, int64_t n) { store(to + i, load(to + i, n) + load(from + i, n), n); });
    }

    const HeadShape shape_;
    const int64_t window_, head_;
    AttentionRoom& room_;
    int64_t stride_ = 0;
};
