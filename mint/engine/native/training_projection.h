// Projections in training: forward, and the gradients of their inputs and of the adapter's matrices.
#pragma once

#include "projection.h"
#include "training_space.h"

// Outputs of a plain weight at a time, so that what they meet stays in the cache from one panel to the next.
constexpr int64_t OUTPUTS_BLOCK = 384;

// The gradient of a projection's inputs from that of its outputs: grad W. `room` for the rows in pairs.
inline void product_back(const Back& back, Rows grad, int64_t rows, float* out, uint32_t* room) {
    if (back.pairs) {
        const int64_t pairs = pairs_of(back.outputs);
        round_rows(grad, rows, back.outputs, room);
        for (int64_t column = 0; column < back.inputs; column += PANEL)
            product(
                PairRows{room, pairs}, rows, back.pairs + column * pairs, back.outputs, nullptr, out + column, back.inputs,
                false, std::min(PANEL, back.inputs - column)
            );
        return;
    }
    const int64_t block = back.step ? OUTPUTS_BLOCK : back.outputs;
    for (int64_t first = 0; first < back.outputs; first += block) {
        const Rows from{grad.start + first, grad.stride};
        const int64_t outputs = std::min(block, back.outputs - first);
        for (int64_t column = 0; column < back.inputs; column += PANEL) {
            const float* panel = back.weight + (back.step ? first * back.step + column : column * back.outputs);
            const int64_t columns = std::min(PANEL, back.inputs - column);
            product(from, rows, panel, outputs, nullptr, out + column, back.inputs, first > 0, columns, back.step);
        }
    }
}

class Projections {
public:
    Projections(const Model& model, const TrainedAdapter& adapter)
        : model_(model), adapter_(adapter), turns_(model.decoder->projections()) {}

    // The adapter's part of a projection, if it has one.
    const TrainedLowRank* low_rank(int64_t number) const { return adapter_.part(number); }

    int64_t rank(int64_t number) const { return adapter_.rank(number); }

    // out = x W + bias + up(down x), and what was in `out` too where it is to be added; `low` gets the reduced rows.
    void project(
        const Matrix& matrix, int64_t number, Rows x, int64_t rows, float* low, float* out, bool add, Bench& bench
    ) {
        const TrainedLowRank* added = low_rank(number);
        const int64_t rank = added ? added->forward.rank : 0;
        if (added) reduce(added->forward, x, rows, matrix.inputs, low, rank);
        const Inputs from = inputs_of(matrix, x, rows, bench.pairs);
        for (int64_t panel = 0; panel < panels_of(matrix.outputs); panel++) {
            project_panel(matrix, panel, from, rows, out, add);
            if (added) widen(added->forward, panel, {low, rank}, rows, out, matrix.outputs);
        }
    }

    // A block's gradient of its inputs goes to `out`, if there is one. To those of the adapter's matrices it adds in its
    // turn: before the first of the blocks that are to come there is a `restart`, and one without gradients has a `pass`.
    void project_back(
        int64_t number, Rows x, const RowBlock& block, const float* low, const float* grad, float* out, Bench& bench
    ) {
        const Back& back = model_.back[number];
        const int64_t rows = block.rows, inputs = back.inputs;
        const Rows given{grad, back.outputs};
        const TrainedLowRank* added = low_rank(number);
        if (added) {
            reduce_back(*added, rows, given, bench.low);
            turns_[number].take(block.number, [&] { add_gradients(*added, x, rows, inputs, low, given, bench.low); });
        }
        if (!out) return;
        product_back(back, given, rows, out, bench.pairs);
        if (!added) return;
        const int64_t rank = added->forward.rank;
        for (int64_t column = 0; column < inputs; column += PANEL)
            product(
                {bench.low, rank}, rows, added->back_down + column * rank, rank, nullptr, out + column, inputs, true,
                std::min(PANEL, inputs - column)
            );
    }

    void restart(int64_t number) { turns_[number].restart(); }

    void pass(int64_t number, const RowBlock& block) {
        if (low_rank(number)) turns_[number].pass(block.number);
    }

private:
    // The gradient of the rows that the adapter reduced.
    static void reduce_back(const TrainedLowRank& added, int64_t rows, Rows grad, float* reduced) {
        const int64_t rank = added.forward.rank, each = added.adapted.each;
        const float* back_up = added.back_up;
        for (const AdaptedLinear* linear : added.adapted.linears) {
            const int64_t outputs = linear->outputs;
            const Rows given{grad.start + linear->first, grad.stride};
            for (int64_t column = 0; column < each; column += PANEL)
                product(
                    given, rows, back_up + column * outputs, outputs, nullptr, reduced + column, rank, false,
                    std::min(PANEL, each - column)
                );
            back_up += padded_outputs(each) * outputs, reduced += each;
        }
    }

    static void add_gradients(
        const TrainedLowRank& added, Rows x, int64_t rows, int64_t inputs, const float* low, Rows grad, const float* reduced
    ) {
        const int64_t rank = added.forward.rank, each = added.adapted.each;
        float* grad_up = added.grad_up;
        for (const AdaptedLinear* linear : added.adapted.linears) {
            const Rows given{grad.start + linear->first, grad.stride};
            outer({low, rank}, each, given, linear->outputs, rows, grad_up, linear->outputs);
            grad_up += each * linear->outputs, low += each;
        }
        outer({reduced, rank}, rank, x, inputs, rows, added.grad_down, inputs);
    }

    const Model& model_;
    const TrainedAdapter& adapter_;
    std::vector<Turns> turns_;  // of each projection's blocks
};
