// A decoder's training pass over the packed rows of a tree, in float32 on a CPU, in one thread: log-probs of target
// tokens, then the gradients of an adapter's matrices. What `mint.engine.layers` and `mint.engine.logprobs` do in torch.
//
// Between norm and attention, and between attention and the end of a layer, rows are taken by the block, so that what
// is computed of them stays in the nearer caches. Every sum has one order, given by the micro-batch alone. The
// structures are those of `structures.py`, field by field.

#include <cstdint>
#include <cstring>
#include <vector>

#include "projection.h"
#include "rows.h"
#include "tree_attention.h"

namespace {

// An adapter's part of one projection in training: as for sampling; then, for the way back, each linear's B by its
// outputs, and all A by their inputs; the first output and the number of outputs of each linear; and the gradients,
// [rank, inputs] and [rank, outputs], which are added to.
struct TrainedLowRank {
    LowRank forward;
    const float *back_up, *back_down;
    const int64_t* parts;
    int64_t num_parts;
    float *grad_down, *grad_up;
};

struct Model {
    const Decoder* decoder;
    const Matrix* back;  // the projections' weights by their inputs: four a layer, then the unembedding's
    const float* unembedding_VH;
};

struct MicroBatch {
    int64_t rows;
    const int64_t *tokens, *positions;
    int64_t num_nodes;
    const int64_t *lengths, *parents;
    // Which log-probs are wanted: see `mint.engine.logprobs.Cells`.
    int64_t num_cells, live;
    const int64_t *order, *places, *targets;
    float temperature;
    const TrainedLowRank* adapter;  // four a layer, then the unembedding's; or none
    int64_t keep;                   // there will be a backward pass
    int64_t lean;                   // it computes each layer again
    float* memory;
};

constexpr int64_t ROW_BLOCK = 96;

// Hands out a pass's memory piece by piece, always in the same order; without any it only counts.
class Memory {
public:
    explicit Memory(float* start) : start_(start) {}

    // With room for a vector beyond the last number.
    float* take(int64_t count) {
        float* piece = start_ ? start_ + used_ : nullptr;
        used_ += (count + 2 * LANES - 1) / LANES * LANES;
        return piece;
    }
    int64_t used() const { return used_; }

private:
    float* start_;
    int64_t used_ = 0;
};

// Of one layer, for its backward pass: its input, the heads before their norm, turned, what attention saw and its
// masses, the residual stream in the middle, gate and up, and the rows reduced by each projection's adapter.
struct Kept {
    float *x, *heads, *qkv, *seen, *mass, *middle, *gate_up;
    float* low[PROJECTIONS];
};

struct Space {
    std::vector<Kept> layers;
    float *last, *hidden, *means;
    float *normed, *wide, *narrow, *low, *logits;  // of a block
    float *grad, *grad_qkv, *grad_seen;

    int64_t lay_out(const Model& model, const MicroBatch& batch) {
        const Decoder& d = *model.decoder;
        const int64_t rows = batch.rows, block = std::min(rows, ROW_BLOCK), heads = d.heads * d.head_dim;
        const int64_t both = heads + d.kv_heads * d.head_dim, qkv = both + d.kv_heads * d.head_dim;
        Memory memory(batch.memory);
        layers.resize(d.num_layers);
        const auto rank = [&](int64_t n) { return batch.adapter ? batch.adapter[n].forward.rank : 0; };
        int64_t most_rank = rank(PROJECTIONS * d.num_layers);
        for (int64_t n = 0; n < PROJECTIONS * d.num_layers; n++) most_rank = std::max(most_rank, rank(n));
        for (int64_t n = 0; n < d.num_layers; n++) {
            Kept& kept = layers[n];
            const bool own = n == 0 || (batch.keep && !batch.lean);
            if (!own) kept = layers[0];
            if (n == 0 || batch.keep) kept.x = memory.take(rows * d.hidden);
            if (!own) continue;
            kept.heads = d.layers[n].head_norm ? memory.take(rows * both) : nullptr;
            kept.qkv = memory.take(rows * qkv);
            kept.seen = memory.take(rows * heads);
            kept.mass = memory.take(rows * d.heads);
            kept.middle = memory.take(rows * d.hidden);
            kept.gate_up = memory.take(rows * 2 * d.intermediate);
            for (float*& low : kept.low) low = memory.take(rows * most_rank);
        }
        last = batch.keep ? memory.take(rows * d.hidden) : layers[0].x;
        hidden = memory.take(rows * d.hidden);
        normed = memory.take(block * d.hidden);
        wide = memory.take(block * 2 * d.intermediate);
        narrow = memory.take(block * std::max(d.hidden, d.intermediate));
        low = memory.take(block * most_rank);
        logits = memory.take(block * d.unembedding.outputs);
        if (batch.keep) {
            means = memory.take(batch.live * d.hidden);
            grad = memory.take(rows * d.hidden);
            grad_qkv = memory.take(rows * qkv);
            grad_seen = memory.take(rows * heads);
        }
        return memory.used();
    }
};

class TrainingPass {
public:
    TrainingPass(const Model& model, const MicroBatch& batch)
        : model_(model), decoder_(*model.decoder), batch_(batch), shape_{decoder_.heads, decoder_.kv_heads, decoder_.head_dim, decoder_.scale},
          nodes_(nodes_of(batch.lengths, batch.parents, batch.num_nodes)) {
        space_.lay_out(model, batch);
    }

    void forward(float* logprobs) {
        const int64_t width = decoder_.hidden;
        for (int64_t row = 0; row < batch_.rows; row++)
            std::memcpy(
                space_.layers[0].x + row * width, decoder_.embedding + batch_.tokens[row] * width, width * sizeof(float)
            );
        for (int64_t n = 0; n < decoder_.num_layers; n++)
            layer(n, n + 1 < decoder_.num_layers ? space_.layers[n + 1].x : space_.last);
        for (int64_t row = 0; row < batch_.rows; row++)
            norm(space_.last + row * width, decoder_.final_norm, width, decoder_.eps, space_.hidden + row * width);
        by_chunks(0, batch_.live, [&](int64_t first, int64_t rows) { score(first, rows, true, logprobs); });
        by_chunks(batch_.live, batch_.rows, [&](int64_t first, int64_t rows) { score(first, rows, false, logprobs); });
    }

    void backward(const float* grad_cells) {
        const int64_t width = decoder_.hidden, lowest = lowest_trained();
        std::memset(space_.grad, 0, batch_.rows * width * sizeof(float));
        by_chunks(0, batch_.live, [&](int64_t first, int64_t rows) { score_back(first, rows, grad_cells); });
        for (int64_t n = decoder_.num_layers - 1; n >= lowest; n--) {
            // Its output is written where nobody looks any more.
            if (batch_.lean) layer(n, space_.hidden);
            layer_back(n, n > lowest);
        }
    }

private:
    const TrainedLowRank* low_rank(int64_t number) const {
        return batch_.adapter && batch_.adapter[number].forward.rank ? batch_.adapter + number : nullptr;
    }

    int64_t unembedding() const { return PROJECTIONS * decoder_.num_layers; }

    // No gradient is needed below the first layer with an adapter.
    int64_t lowest_trained() const {
        int64_t number = 0;
        while (number < unembedding() && !low_rank(number)) number++;
        return number / PROJECTIONS;
    }

    // Blocks of a pass's rows, from the last on where that is asked for.
    template <typename Work>
    void by_chunks(int64_t start, int64_t stop, const Work& work) {
        for (int64_t first = start; first < stop; first += ROW_BLOCK) work(first, std::min(ROW_BLOCK, stop - first));
    }

    // out = x W + bias + up(down x), and what was in `out` too where it is to be added; `low` gets the reduced rows.
    void project(const Matrix& matrix, int64_t number, Rows x, int64_t rows, float* low, float* out, bool add) {
        const TrainedLowRank* added = low_rank(number);
        const int64_t rank = added ? added->forward.rank : 0;
        if (added) reduce(added->forward, x, rows, matrix.inputs, low, rank);
        for (int64_t panel = 0; panel < panels_of(matrix.outputs); panel++) {
            project_panel(matrix, panel, x, rows, out, add);
            if (added) widen(added->forward, panel, {low, rank}, rows, out, matrix.outputs);
        }
    }

    // Adds to the gradients of the adapter's matrices; those of the inputs go to `out`, if there is one.
    void project_back(int64_t number, Rows x, int64_t rows, const float* low, const float* grad, float* out) {
        const Matrix& back = model_.back[number];
        const int64_t outputs = back.inputs, inputs = back.outputs;
        const Rows given{grad, outputs};
        const TrainedLowRank* added = low_rank(number);
        if (added) reduce_back(*added, x, rows, inputs, low, given);
        if (!out) return;
        for (int64_t panel = 0; panel < panels_of(inputs); panel++) {
            const int64_t column = panel * PANEL, columns = std::min(PANEL, inputs - column);
            project_panel(back, panel, given, rows, out, false);
            if (!added) continue;
            const int64_t rank = added->forward.rank;
            product({space_.low, rank}, rows, added->back_down + column * rank, rank, nullptr, out + column, inputs, true, columns);
        }
    }

    // The gradients of an adapter's matrices; that of the reduced rows goes to the space's `low`.
    void reduce_back(const TrainedLowRank& added, Rows x, int64_t rows, int64_t inputs, const float* low, Rows grad) {
        const int64_t rank = added.forward.rank, each = rank / added.num_parts;
        const float* back_up = added.back_up;
        for (int64_t part = 0; part < added.num_parts; part++) {
            const int64_t first = added.parts[2 * part], columns = added.parts[2 * part + 1], place = part * each;
            const Rows given{grad.start + first, grad.stride};
            for (int64_t column = 0; column < each; column += PANEL)
                product(
                    given, rows, back_up + column * columns, columns, nullptr, space_.low + place + column, rank, false,
                    std::min(PANEL, each - column)
                );
            back_up += padded_outputs(each) * columns;
            outer({low + place, rank}, each, given, columns, rows, added.grad_up + place * grad.stride + first, grad.stride);
        }
        outer({space_.low, rank}, rank, x, inputs, rows, added.grad_down, inputs);
    }

    void layer(int64_t number, float* out) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        by_chunks(0, batch_.rows, [&](int64_t first, int64_t rows) { attention_inputs(number, first, rows); });
        TreeAttention attention(shape_, layer.window);
        for (const Node& node : nodes_) attention.forward(node, kept.qkv, kept.seen, kept.mass);
        by_chunks(0, batch_.rows, [&](int64_t first, int64_t rows) { after_attention(number, first, rows, out); });
    }

    void attention_inputs(int64_t number, int64_t first, int64_t rows) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, size = decoder_.head_dim, both = decoder_.heads + decoder_.kv_heads;
        for (int64_t n = 0; n < rows; n++)
            norm(kept.x + (first + n) * width, layer.input_norm, width, decoder_.eps, space_.normed + n * width);
        float* low = kept.low[QKV] + first * rank_of(PROJECTIONS * number + QKV);
        project(layer.qkv, PROJECTIONS * number + QKV, {space_.normed, width}, rows, low, kept.qkv + first * shape_.width(), false);
        for (int64_t row = first; row < first + rows; row++) {
            float* x = kept.qkv + row * shape_.width();
            const int64_t position = batch_.positions[row];
            if (layer.head_norm) std::memcpy(kept.heads + row * both * size, x, both * size * sizeof(float));
            for (int64_t head = 0; head < both; head++, x += size) {
                if (layer.head_norm) norm(x, layer.head_norm + head * size, size, decoder_.eps, x);
                turn(x, decoder_.cosine + position * size, decoder_.sine + position * size, size);
            }
        }
    }

    void after_attention(int64_t number, int64_t first, int64_t rows, float* out) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, seen = decoder_.heads * decoder_.head_dim, inner = decoder_.intermediate;
        const auto low = [&](int64_t n) { return kept.low[n] + first * rank_of(PROJECTIONS * number + n); };
        float *middle = kept.middle + first * width, *gate_up = space_.wide;
        std::memcpy(middle, kept.x + first * width, rows * width * sizeof(float));
        project(layer.out, PROJECTIONS * number + OUT, {kept.seen + first * seen, seen}, rows, low(OUT), middle, true);
        for (int64_t n = 0; n < rows; n++)
            norm(middle + n * width, layer.mlp_norm, width, decoder_.eps, space_.normed + n * width);
        project(layer.gate_up, PROJECTIONS * number + GATE_UP, {space_.normed, width}, rows, low(GATE_UP), gate_up, false);
        for (int64_t n = 0; n < rows; n++) gate(gate_up + n * 2 * inner, inner, space_.narrow + n * inner);
        std::memcpy(kept.gate_up + first * 2 * inner, gate_up, rows * 2 * inner * sizeof(float));
        std::memcpy(out + first * width, middle, rows * width * sizeof(float));
        project(layer.down, PROJECTIONS * number + DOWN, {space_.narrow, inner}, rows, low(DOWN), out + first * width, true);
    }

    // `grad` goes from the layer's output to its input, if anybody is interested in that.
    void layer_back(int64_t number, bool wanted) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        by_chunks(0, batch_.rows, [&](int64_t first, int64_t rows) { after_attention_back(number, first, rows); });
        std::memset(space_.grad_qkv, 0, batch_.rows * shape_.width() * sizeof(float));
        TreeAttention attention(shape_, layer.window);
        for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node)
            attention.backward(*node, kept.qkv, kept.seen, kept.mass, space_.grad_seen, space_.grad_qkv);
        by_chunks(0, batch_.rows, [&](int64_t first, int64_t rows) { attention_inputs_back(number, first, rows, wanted); });
    }

    void after_attention_back(int64_t number, int64_t first, int64_t rows) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, seen = decoder_.heads * decoder_.head_dim, inner = decoder_.intermediate;
        const auto low = [&](int64_t n) { return kept.low[n] + first * rank_of(PROJECTIONS * number + n); };
        const float *middle = kept.middle + first * width, *gate_up = kept.gate_up + first * 2 * inner;
        float* grad = space_.grad + first * width;
        if (all_zero(grad, rows * width)) {  // as of prompts, in the last layer
            std::memset(space_.grad_seen + first * seen, 0, rows * seen * sizeof(float));
            return;
        }
        // The gated rows again, then their gradients in their place.
        for (int64_t n = 0; n < rows; n++) gate(gate_up + n * 2 * inner, inner, space_.narrow + n * inner);
        float* grad_gated = space_.wide;
        project_back(PROJECTIONS * number + DOWN, {space_.narrow, inner}, rows, low(DOWN), grad, grad_gated);
        std::memcpy(space_.narrow, grad_gated, rows * inner * sizeof(float));
        for (int64_t n = 0; n < rows; n++)
            gate_back(gate_up + n * 2 * inner, inner, space_.narrow + n * inner, space_.wide + n * 2 * inner);
        for (int64_t n = 0; n < rows; n++)
            norm(middle + n * width, layer.mlp_norm, width, decoder_.eps, space_.normed + n * width);
        project_back(PROJECTIONS * number + GATE_UP, {space_.normed, width}, rows, low(GATE_UP), space_.wide, space_.narrow);
        for (int64_t n = 0; n < rows; n++)
            norm_back(
                middle + n * width, layer.mlp_norm, width, decoder_.eps, space_.narrow + n * width, grad + n * width, true
            );
        const Rows x{kept.seen + first * seen, seen};
        project_back(PROJECTIONS * number + OUT, x, rows, low(OUT), grad, space_.grad_seen + first * seen);
    }

    void attention_inputs_back(int64_t number, int64_t first, int64_t rows, bool wanted) {
        const Layer& layer = decoder_.layers[number];
        const Kept& kept = space_.layers[number];
        const int64_t width = decoder_.hidden, size = decoder_.head_dim, both = decoder_.heads + decoder_.kv_heads;
        for (int64_t row = first; row < first + rows; row++) {
            float* grad = space_.grad_qkv + row * shape_.width();
            const int64_t position = batch_.positions[row];
            for (int64_t head = 0; head < both; head++, grad += size) {
                turn_back(grad, decoder_.cosine + position * size, decoder_.sine + position * size, size);
                if (!layer.head_norm) continue;
                const float* x = kept.heads + (row * both + head) * size;
                norm_back(x, layer.head_norm + head * size, size, decoder_.eps, grad, grad, false);
            }
        }
        const float* x = kept.x + first * width;
        for (int64_t n = 0; n < rows; n++)
            norm(x + n * width, layer.input_norm, width, decoder_.eps, space_.normed + n * width);
        const int64_t projection = PROJECTIONS * number + QKV;
        project_back(
            projection, {space_.normed, width}, rows, kept.low[QKV] + first * rank_of(projection),
            space_.grad_qkv + first * shape_.width(), wanted ? space_.narrow : nullptr
        );
        if (!wanted) return;
        float* grad = space_.grad + first * width;
        for (int64_t n = 0; n < rows; n++)
            norm_back(x + n * width, layer.input_norm, width, decoder_.eps, space_.narrow + n * width, grad + n * width, true);
    }

    int64_t rank_of(int64_t number) const { return batch_.adapter ? batch_.adapter[number].forward.rank : 0; }

    // Logits of the rows first..first+rows-1 of the cells' order, whose hidden states come to stand in `narrow`.
    void logits(int64_t first, int64_t rows) {
        const int64_t width = decoder_.hidden;
        for (int64_t n = 0; n < rows; n++)
            std::memcpy(
                space_.narrow + n * width, space_.hidden + batch_.order[first + n] * width, width * sizeof(float)
            );
        project(decoder_.unembedding, unembedding(), {space_.narrow, width}, rows, space_.low, space_.logits, false);
    }

    // A row's logits become e^((logit - largest) / temperature); gives their sum, and the largest.
    double powers(float* logits, float* largest) const {
        const int64_t vocabulary = decoder_.unembedding.outputs;
        const Vector hidden = splat(-INF), rate = splat(1.0f / batch_.temperature);
        Vector most = hidden;
        by_vectors(vocabulary, [&](int64_t i, int64_t n) {
            for_lanes(logits + i, n, [&](Vector x) { most = x > most ? x : most; });
        });
        *largest = largest_of(most);
        const Vector peak = splat(*largest);
        double total = 0.0;
        constexpr int64_t RUN = 16 * LANES;  // tokens whose probabilities are summed at once, as where they are drawn
        for (int64_t start = 0; start < vocabulary; start += RUN) {
            Vector sum = {};
            by_vectors(std::min(RUN, vocabulary - start), [&](int64_t i, int64_t n) {
                float* place = logits + start + i;
                for_lanes(place, n, [&](Vector x) {
                    const Vector power = exponential((x - peak) * rate);
                    sum += power;
                    store(place, power, n);
                });
            });
            total += sum_of(sum);
        }
        return total;
    }

    // The first `count` lanes; the others hold -inf.
    template <typename Work>
    static void for_lanes(const float* from, int64_t count, const Work& work) {
        if (count >= LANES) return work(load(from));
        Vector x = splat(-INF);
        std::memcpy(&x, from, count * sizeof(float));
        work(x);
    }

    // The cells of a row of the order: they stand in the rows' order.
    template <typename Work>
    void by_cells(int64_t row, const Work& work) const {
        const int64_t* stop = batch_.places + batch_.num_cells;
        for (const int64_t* place = std::lower_bound(batch_.places, stop, row); place < stop && *place == row; place++)
            work(place - batch_.places);
    }

    void score(int64_t first, int64_t rows, bool live, float* logprobs) {
        const int64_t vocabulary = decoder_.unembedding.outputs, width = decoder_.hidden;
        std::vector<double> sums(rows);
        logits(first, rows);
        for (int64_t n = 0; n < rows; n++) {
            float *row = space_.logits + n * vocabulary, largest;
            by_cells(first + n, [&](int64_t cell) { logprobs[cell] = row[batch_.targets[cell]]; });
            sums[n] = powers(row, &largest);
            by_cells(first + n, [&](int64_t cell) {
                logprobs[cell] = float(double((logprobs[cell] - largest) / batch_.temperature) - std::log(sums[n]));
            });
        }
        // With an adapter of its own the unembedding is gone through again on the way back.
        if (!live || !batch_.keep || low_rank(unembedding())) return;
        float* means = space_.means + first * width;
        const Matrix& back = model_.back[unembedding()];
        for (int64_t panel = 0; panel < panels_of(width); panel++)
            project_panel(back, panel, {space_.logits, vocabulary}, rows, means, false);
        for (int64_t n = 0; n < rows; n++) {
            const Vector share = splat(float(1.0 / sums[n]));
            float* mean = means + n * width;
            by_vectors(width, [&](int64_t i, int64_t count) { store(mean + i, load(mean + i, count) * share, count); });
        }
    }

    // From the gradients of log-probs to those of the last layer's output, and of the unembedding's adapter.
    void score_back(int64_t first, int64_t rows, const float* grad_cells) {
        const int64_t width = decoder_.hidden;
        float* grad = space_.normed;
        if (low_rank(unembedding()))
            adapted_back(first, rows, grad_cells, grad);
        else
            for (int64_t n = 0; n < rows; n++) plain_back(first + n, grad_cells, grad + n * width);
        for (int64_t n = 0; n < rows; n++) {
            const int64_t row = batch_.order[first + n] * width;
            norm_back(
                space_.last + row, decoder_.final_norm, width, decoder_.eps, grad + n * width, space_.grad + row, false
            );
        }
    }

    // A log-prob's gradient in its hidden state is the target's row of the unembedding less the mean row.
    void plain_back(int64_t place, const float* grad_cells, float* grad) const {
        const int64_t width = decoder_.hidden;
        std::memset(grad, 0, width * sizeof(float));
        float taken = 0.0f;
        const auto add = [&](const float* row, float factor) {
            const Vector times = splat(factor);
            by_vectors(width, [&](int64_t i, int64_t n) { store(grad + i, load(grad + i, n) + load(row + i, n) * times, n); });
        };
        by_cells(place, [&](int64_t cell) {
            const float given = grad_cells[cell] / batch_.temperature;
            taken += given;
            add(model_.unembedding_VH + batch_.targets[cell] * width, given);
        });
        add(space_.means + place * width, -taken);
    }

    void adapted_back(int64_t first, int64_t rows, const float* grad_cells, float* grad) {
        const int64_t vocabulary = decoder_.unembedding.outputs, width = decoder_.hidden;
        logits(first, rows);
        std::vector<float> low(space_.low, space_.low + rows * rank_of(unembedding()));
        for (int64_t n = 0; n < rows; n++) {
            float *row = space_.logits + n * vocabulary, taken = 0.0f, largest;
            const double sum = powers(row, &largest);
            by_cells(first + n, [&](int64_t cell) { taken += grad_cells[cell] / batch_.temperature; });
            const Vector share = splat(float(-taken / sum));
            by_vectors(vocabulary, [&](int64_t i, int64_t count) { store(row + i, load(row + i, count) * share, count); });
            by_cells(first + n, [&](int64_t cell) { row[batch_.targets[cell]] += grad_cells[cell] / batch_.temperature; });
        }
        project_back(unembedding(), {space_.narrow, width}, rows, low.data(), space_.logits, grad);
    }

    const Model& model_;
    const Decoder& decoder_;
    const MicroBatch& batch_;
    const HeadShape shape_;
    const std::vector<Node> nodes_;
    Space space_;
};

}  // namespace

extern "C" {

// The weights by their inputs, for products with the gradients of their outputs.
void mint_pack_back(const float* weight_OI, int64_t outputs, int64_t inputs, float* packed) {
    pack(weight_OI, inputs, outputs, 1, inputs, packed);
}

// An adapter's B of each of its linears, whose outputs `parts` names, and its A, for the way back.
void mint_pack_low_rank_back(
    const float* down_RI, const float* up_RO, int64_t rank, int64_t inputs, int64_t outputs, const int64_t* parts,
    int64_t num_parts, float* back_up, float* back_down
) {
    const int64_t each = rank / num_parts;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t first = parts[2 * part], columns = parts[2 * part + 1];
        pack(up_RO + part * each * outputs + first, each, columns, outputs, 1, back_up);
        back_up += padded_outputs(each) * columns;
    }
    pack(down_RI, inputs, rank, 1, inputs, back_down);
}

// How many floats of memory a pass wants.
int64_t mint_training_memory(const Model* model, const MicroBatch* batch) { return Space().lay_out(*model, *batch); }

void mint_training_forward(const Model* model, const MicroBatch* batch, float* logprobs) {
    TrainingPass(*model, *batch).forward(logprobs);
}

// After `mint_training_forward` with the same memory.
void mint_training_backward(const Model* model, const MicroBatch* batch, const float* grad_cells) {
    TrainingPass(*model, *batch).backward(grad_cells);
}

}  // extern "C"
