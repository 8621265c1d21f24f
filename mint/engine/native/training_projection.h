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
    Projections(const Model& model, const TrainedAdapter& adapter, Space& space)
        : model_(model), adapter_(adapter), space_(space) {}

    // The adapter's part of a projection, if it has one.
    const TrainedLowRank* low_rank(int64_t number) const { return adapter_.part(number); }

    int64_t rank(int64_t number) const { return adapter_.rank(number); }

    // out = x W + bias + up(down x), and what was in `out` too where it is to be added; `low` gets the reduced rows.
    void project(const Matrix& matrix, int64_t number, Rows x, int64_t rows, float* low, float* out, bool add) {
        const TrainedLowRank* added = low_rank(number);
        const int64_t rank = added ? added->forward.rank : 0;
        if (added) reduce(added->forward, x, rows, matrix.inputs, low, rank);
        const Inputs from = inputs_of(matrix, x, rows, space_.pairs);
        for (int64_t panel = 0; panel < panels_of(matrix.outputs); panel++) {
            project_panel(matrix, panel, from, rows, out, add);
            if (added) widen(added->forward, panel, {low, rank}, rows, out, matrix.outputs);
        }
    }

    // Adds to the gradients of the adapter's matrices; those of the inputs go to `out`, if there is one.
    void project_back(int64_t number, Rows x, int64_t rows, const float* low, const float* grad, float* out) {
        const Back& back = model_.back[number];
        const Rows given{grad, back.outputs};
        const TrainedLowRank* added = low_rank(number);
        if (added) reduce_back(*added, x, rows, back.inputs, low, given);
        if (!out) return;
        product_back(back, given, rows, out, space_.pairs);
        if (!added) return;
        const int64_t rank = added->forward.rank, inputs = back.inputs;
        for (int64_t column = 0; column < inputs; column += PANEL)
            product(
                {space_.low, rank}, rows, added->back_down + column * rank, rank, nullptr, out + column, inputs, true,
                std::min(PANEL, inputs - column)
            );
    }

private:
    // The gradients of an adapter's matrices; that of the reduced rows goes to the space's `low`.
    void reduce_back(const TrainedLowRank& added, Rows x, int64_t rows, int64_t inputs, const float* low, Rows grad) {
        const int64_t rank = added.forward.rank, each = added.adapted.each;
        const float* back_up = added.back_up;
        float *grad_up = added.grad_up, *reduced = space_.low;
        for (const AdaptedLinear* linear : added.adapted.linears) {
            const int64_t outputs = linear->outputs;
            const Rows given{grad.start + linear->first, grad.stride};
            for (int64_t column = 0; column < each; column += PANEL)
                product(
                    given, rows, back_up + column * outputs, outputs, nullptr, reduced + column, rank, false,
                    std::min(PANEL, each - column)
                );
            outer({low, rank}, each, given, outputs, rows, grad_up, outputs);
            back_up += padded_outputs(each) * outputs, grad_up += each * outputs, low += each, reduced += each;
        }
        outer({space_.low, rank}, rank, x, inputs, rows, added.grad_down, inputs);
    }

    const Model& model_;
    const TrainedAdapter& adapter_;
    Space& space_;
};
