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

// What a product reads: rows, and, for a matrix in pairs, the same rounded.
struct Inputs {
    Rows x;
    PairRows pairs;

    Inputs from(int64_t row) const { return {x.from(row), pairs.from(row)}; }
};

// `room` for the rows in pairs, if the matrix wants them so.
inline Inputs inputs_of(const Matrix& matrix, Rows x, int64_t rows, uint32_t* room) {
    if (!matrix.pairs) return {x, {}};
    round_rows(x, rows, matrix.inputs, room);
    return {x, {room, pairs_of(matrix.inputs)}};
}

// One panel of the base model's product; `out` is as wide as the matrix.
inline void project_panel(const Matrix& matrix, int64_t panel, Inputs from, int64_t rows, float* out, bool add) {
    const int64_t column = panel * PANEL, columns = std::min(PANEL, matrix.outputs - column), inputs = matrix.inputs;
    const float* bias = matrix.bias ? matrix.bias + column : nullptr;
    const auto with = [&](auto x, const auto* packed) {
        product(x, rows, packed, inputs, bias, out + column, matrix.outputs, add, columns);
    };
    if (matrix.pairs)
        with(from.pairs, matrix.pairs + column * pairs_of(inputs));
    else if (matrix.halves && rows <= HALVED_ROWS)
        with(from.x, matrix.halves + column * inputs);
    else
        with(from.x, matrix.packed + column * inputs);
}
