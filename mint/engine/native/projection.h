// A projection and what an adapter adds to it: x W + bias + up(down x), panel by panel.
#pragma once

#include "matrix.h"
#include "model.h"

// The rows through an adapter's A.
inline void reduce(const LowRank& low, Rows x, int64_t rows, int64_t inputs, float* out, int64_t stride) {
    for (int64_t column = 0; column < low.rank; column += PANEL)
        product(
            x, rows, low.down + column * inputs, inputs, nullptr, out + column, stride, false,
            std::min(PANEL, low.rank - column)
        );
}

// Adds what one panel of an adapter's B makes of the reduced rows.
inline void widen(const LowRank& low, int64_t panel, Rows reduced, int64_t rows, float* out, int64_t outputs) {
    if (low.rank == 0) return;
    const int64_t start = low.ranges[2 * panel], stop = low.ranges[2 * panel + 1];
    if (start == stop) return;
    const int64_t column = panel * PANEL, columns = std::min(PANEL, outputs - column);
    const float* weight = low.up + column * low.rank + start * padded_outputs(columns);
    const Rows from{reduced.start + start, reduced.stride};
    product(from, rows, weight, stop - start, nullptr, out + column, outputs, true, columns);
}

// Up to so many rows a product waits for the memory, and halves are faster; then widening them takes longer.
constexpr int64_t HALVED_ROWS = 16;

// One panel of the base model's product; `out` is as wide as the matrix.
inline void project_panel(const Matrix& matrix, int64_t panel, Rows x, int64_t rows, float* out, bool add) {
    const int64_t column = panel * PANEL, columns = std::min(PANEL, matrix.outputs - column), inputs = matrix.inputs;
    const float* bias = matrix.bias ? matrix.bias + column : nullptr;
    const auto with = [&](const auto* packed) {
        product(x, rows, packed + column * inputs, inputs, bias, out + column, matrix.outputs, add, columns);
    };
    if (matrix.halves && rows <= HALVED_ROWS)
        with(matrix.halves);
    else
        with(matrix.packed);
}
