// The layers of a training pass, forward and back: norm and projection, attention, the rest of the layer.
#pragma once

#include <cstring>

#include "rows.h"
#include "training_projection.h"
#include "tree_attention.h"

class Layers {
public:
    Layers(const Model& model, const MicroBatch& batch, Space& space, Projections& projections, Crew& crew)
        : decoder_(*model.decoder), batch_(batch), space_(space), projections_(projections), crew_(crew),
          shape_{decoder_.heads, decoder_.kv_heads, decoder_.head_dim, decoder_.scale},
          nodes_(nodes_of(batch.lengths, batch.parents, batch.num_nodes)) {}

    void forward(int64_t number, float* out) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        by_blocks([&](const RowBlock& block, Bench& bench) { attention_inputs(number, block, bench); });
        by_nodes([&](const Node& node, int64_t, int64_t head, AttentionRoom& room) {
            TreeAttention(shape_, layer.window, head, room).forward(node, kept.qkv, kept.seen, kept.mass);
        });
        by_blocks([&](const RowBlock& block, Bench& bench) { after_attention(number, block, out, bench); });
    }

    // `grad` goes from the layer's output to its input, if anybody is interested in that.
    void backward(int64_t number, bool wanted) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        for (const Projection kind : {QKV, OUT, GATE_UP, DOWN}) projections_.restart(PROJECTIONS * number + kind);
        by_blocks([&](const RowBlock& block, Bench& bench) { after_attention_back(number, block, bench); });
        std::memset(space_.grad_qkv, 0, batch_.rows * shape_.width() * sizeof(float));
        std::vector<Turns> turns(shape_.kv_heads);
        by_nodes([&](const Node& node, int64_t place, int64_t head, AttentionRoom& room) {
            TreeAttention attention(shape_, layer.window, head, room);
            attention.backward(node, kept.qkv, kept.seen, kept.mass, space_.grad_seen, space_.grad_qkv);
            turns[head].take(place, [&] { attention.add_gradients(node, space_.grad_qkv); });
        });
        by_blocks([&](const RowBlock& block, Bench& bench) { attention_inputs_back(number, block, wanted, bench); });
    }

private:
    template <typename Work>
    void by_blocks(const Work& work) {
        crew_.by_blocks(0, batch_.rows, work);
    }

    // Calls work(node, its place, head, room) for each node and key/value head, the deepest nodes first.
    template <typename Work>
    void by_nodes(const Work& work) {
        const int64_t heads = shape_.kv_heads, count = int64_t(nodes_.size());
        crew_.by_pieces(count * heads, [&](int64_t piece, Bench& bench) {
            work(nodes_[count - 1 - piece / heads], piece / heads, piece % heads, bench.attention);
        });
    }

    // The rows from `first` on, as the projection's adapter reduced them.
    float* low_of(int64_t number, Projection kind, int64_t first) const {
        return space_.layers[number].low[kind] + first * projections_.rank(PROJECTIONS * number + kind);
    }

    void attention_inputs(int64_t number, const RowBlock& block, Bench& bench) {
        const auto [_, first, rows] = block;
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, size = decoder_.head_dim, both = decoder_.heads + decoder_.kv_heads;
        for (int64_t n = 0; n < rows; n++)
            norm(kept.x + (first + n) * width, layer.input_norm, width, decoder_.eps, bench.normed + n * width);
        float *low = low_of(number, QKV, first), *qkv = kept.qkv + first * shape_.width();
        projections_.project(layer.qkv, PROJECTIONS * number + QKV, {bench.normed, width}, rows, low, qkv, false, bench);
        for (int64_t row = first; row < first + rows; row++) {
            float* x = kept.qkv + row * shape_.width();
            const int64_t position = batch_.positions[row];
            if (layer.head_norm) std::memcpy(kept.heads + row * both * size, x, both * size * sizeof(float));
            for (int64_t head = 0; head < both; head++, x += size) {
                if (layer.head_norm) norm(x, layer.head_norm + head * size, size, decoder_.eps, x);
                turn(x, layer.cosine + position * size, layer.sine + position * size, size);
            }
        }
    }

    void after_attention(int64_t number, const RowBlock& block, float* out, Bench& bench) {
        const auto [_, first, rows] = block;
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, seen = decoder_.heads * decoder_.head_dim, inner = decoder_.intermediate;
        float *middle = kept.middle + first * width, *gate_up = bench.wide;
        std::memcpy(middle, kept.x + first * width, rows * width * sizeof(float));
        const auto project = [&](const Matrix& matrix, Projection kind, Rows x, float* to, bool add) {
            float* low = low_of(number, kind, first);
            projections_.project(matrix, PROJECTIONS * number + kind, x, rows, low, to, add, bench);
        };
        // To the residual stream `to`, through a norm if there is one, whose inputs are kept.
        const auto add = [&](const Matrix& matrix, Projection kind, Rows x, float* to, const float* norm, float* kept) {
            if (!norm) return project(matrix, kind, x, to, true);
            project(matrix, kind, x, kept + first * width, false);
            for (int64_t n = 0; n < rows; n++)
                add_norm(kept + (first + n) * width, norm, width, decoder_.eps, to + n * width);
        };
        add(layer.out, OUT, {kept.seen + first * seen, seen}, middle, layer.attention_norm, kept.attended);
        for (int64_t n = 0; n < rows; n++)
            norm(middle + n * width, layer.mlp_norm, width, decoder_.eps, bench.normed + n * width);
        project(layer.gate_up, GATE_UP, {bench.normed, width}, gate_up, false);
        for (int64_t n = 0; n < rows; n++)
            gate(decoder_.gelu, gate_up + n * 2 * inner, inner, bench.narrow + n * inner);
        std::memcpy(kept.gate_up + first * 2 * inner, gate_up, rows * 2 * inner * sizeof(float));
        std::memcpy(out + first * width, middle, rows * width * sizeof(float));
        add(layer.down, DOWN, {bench.narrow, inner}, out + first * width, layer.gated_norm, kept.passed);
    }

    void after_attention_back(int64_t number, const RowBlock& block, Bench& bench) {
        const auto [_, first, rows] = block;
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, seen = decoder_.heads * decoder_.head_dim, inner = decoder_.intermediate;
        const float *middle = kept.middle + first * width, *gate_up = kept.gate_up + first * 2 * inner;
        float* grad = space_.grad + first * width;
        if (all_zero(grad, rows * width)) {  // as of prompts, in the last layer
            std::memset(space_.grad_seen + first * seen, 0, rows * seen * sizeof(float));
            for (const Projection kind : {DOWN, GATE_UP, OUT}) projections_.pass(PROJECTIONS * number + kind, block);
            return;
        }
        // From the gradient of the residual stream to that of what was added to it.
        const auto added_back = [&](const float* norm, const float* kept) -> const float* {
            if (!norm) return grad;
            for (int64_t n = 0; n < rows; n++)
                norm_back(
                    kept + (first + n) * width, norm, width, decoder_.eps, grad + n * width, bench.added + n * width, false
                );
            return bench.added;
        };
        // The gated rows again, then their gradients in their place.
        for (int64_t n = 0; n < rows; n++)
            gate(decoder_.gelu, gate_up + n * 2 * inner, inner, bench.narrow + n * inner);
        float* grad_gated = bench.wide;
        const auto back = [&](Projection kind, Rows x, const float* given, float* to) {
            const float* low = low_of(number, kind, first);
            projections_.project_back(PROJECTIONS * number + kind, x, block, low, given, to, bench);
        };
        back(DOWN, {bench.narrow, inner}, added_back(layer.gated_norm, kept.passed), grad_gated);
        std::memcpy(bench.narrow, grad_gated, rows * inner * sizeof(float));
        for (int64_t n = 0; n < rows; n++)
            gate_back(
                decoder_.gelu, gate_up + n * 2 * inner, inner, bench.narrow + n * inner, bench.wide + n * 2 * inner
            );
        for (int64_t n = 0; n < rows; n++)
            norm(middle + n * width, layer.mlp_norm, width, decoder_.eps, bench.normed + n * width);
        back(GATE_UP, {bench.normed, width}, bench.wide, bench.narrow);
        for (int64_t n = 0; n < rows; n++)
            norm_back(
                middle + n * width, layer.mlp_norm, width, decoder_.eps, bench.narrow + n * width, grad + n * width, true
            );
        const float* grad_attended = added_back(layer.attention_norm, kept.attended);
        back(OUT, {kept.seen + first * seen, seen}, grad_attended, space_.grad_seen + first * seen);
    }

    void attention_inputs_back(int64_t number, const RowBlock& block, bool wanted, Bench& bench) {
        const auto [_, first, rows] = block;
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, size = decoder_.head_dim, both = decoder_.heads + decoder_.kv_heads;
        for (int64_t row = first; row < first + rows; row++) {
            float* grad = space_.grad_qkv + row * shape_.width();
            const int64_t position = batch_.positions[row];
            for (int64_t head = 0; head < both; head++, grad += size) {
                turn_back(grad, layer.cosine + position * size, layer.sine + position * size, size);
                if (!layer.head_norm) continue;
                const float* x = kept.heads + (row * both + head) * size;
                norm_back(x, layer.head_norm + head * size, size, decoder_.eps, grad, grad, false);
            }
        }
        const float* x = kept.x + first * width;
        for (int64_t n = 0; n < rows; n++)
            norm(x + n * width, layer.input_norm, width, decoder_.eps, bench.normed + n * width);
        projections_.project_back(
            PROJECTIONS * number + QKV, {bench.normed, width}, block, low_of(number, QKV, first),
            space_.grad_qkv + first * shape_.width(), wanted ? bench.narrow : nullptr, bench
        );
        if (!wanted) return;
        float* grad = space_.grad + first * width;
        for (int64_t n = 0; n < rows; n++)
            norm_back(
                x + n * width, layer.input_norm, width, decoder_.eps, bench.narrow + n * width, grad + n * width, true
            );
    }

    const Decoder& decoder_;
    const MicroBatch& batch_;
    Space& space_;
    Projections& projections_;
    Crew& crew_;
    const HeadShape shape_;
    const std::vector<Node> nodes_;
};
