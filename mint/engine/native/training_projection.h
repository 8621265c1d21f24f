// Projections in training: forward, and the gradients of their inputs and of the adapter's matrices.
#pragma once

#include "projection.h"
#include "training_space.h"

class Projections {
public:
    Projections(const Model& model, const MicroBatch& batch, Space& space)
        : model_(model), batch_(batch), space_(space) {}

    // The adapter's part of a projection, if it has one.
    const TrainedLowRank* low_rank(int64_t number) const {
        return batch_.adapter && batch_.adapter[number].forward.rank ? batch_.adapter + number : nullptr;
    }

    int64_t rank(int64_t number) const { return batch_.adapter ? batch_.adapter[number].forward.rank : 0; }

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
            const float* down = added->back_down + column * rank;
            product({space_.low, rank}, rows, down, rank, nullptr, out + column, inputs, true, columns);
        }
    }

private:
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
            float* grad_up = added.grad_up + place * grad.stride + first;
            outer({low + place, rank}, each, given, columns, rows, grad_up, grad.stride);
        }
        outer({space_.low, rank}, rank, x, inputs, rows, added.grad_down, inputs);
    }

    const Model& model_;
    const MicroBatch& batch_;
    Space& space_;
};
