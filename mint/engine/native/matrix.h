// Products with packed matrices, each output summed in one order whatever the number of rows.
//
// A matrix of O outputs and I inputs is packed in panels of PANEL outputs (the last may be narrower, in whole vectors):
// panel after panel, input after input, the outputs next to each other. So an output's sum runs over its inputs one
// after the other, in pieces (`piece_of`) that are added in order; nothing else decides its bits.
#pragma once

#include <cstdint>

#include "vectors.h"

constexpr int64_t PANEL = PANEL_VECTORS * LANES;

inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

inline int64_t vectors_of(int64_t columns) { return (columns + LANES - 1) / LANES; }

// Outputs of the panels, with those that fill up the last vector.
inline int64_t padded_outputs(int64_t outputs) { return vectors_of(outputs) * LANES; }

template <typename Number>
struct RowsOf {
    const Number* start;
    int64_t stride;

    RowsOf from(int64_t row) const { return {start + row * stride, stride}; }
};

using Rows = RowsOf<float>;
// Inputs rounded to bfloat16, two in a number, the first in its lower half; after an odd one a zero.
using PairRows = RowsOf<uint32_t>;

inline int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }

// The rows times the first `columns` (at most PANEL) of a panel: out = x W (+ bias) (+ out). `step`: floats from one
// input's weights to the next one's, as many as the columns fill unless told otherwise; `piece`: inputs summed in one go.
void product(
    Rows x, int64_t rows, const float* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride, bool add,
    int64_t columns, int64_t step = 0, int64_t piece = 0
);

// The same, to the last bit, from the upper halves (bfloat16) of weights whose lower ones are 0. They come from memory in
// half of the time and are widened on the way.
void product(
    Rows x, int64_t rows, const uint16_t* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride,
    bool add, int64_t columns
);

// The same in bfloat16: of weights in pairs of inputs, with inputs rounded to it; sums are float32.
void product(
    PairRows x, int64_t rows, const uint32_t* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride,
    bool add, int64_t columns
);

// The rows one after the other in pairs of inputs.
void round_rows(Rows x, int64_t rows, int64_t inputs, uint32_t* out);

// out += left^T right over `count` rows of each; each output is summed over the rows in order. Reads whole vectors of
// `right`, so up to a vector beyond its last number.
void outer(
    Rows left, int64_t left_columns, Rows right, int64_t right_columns, int64_t count, float* out, int64_t out_stride
);

// `weight` lies output by output, `stride_i` 1, or input by input, `stride_o` 1.
void pack(const float* weight, int64_t outputs, int64_t inputs, int64_t stride_o, int64_t stride_i, float* packed);

// The same of weights in bfloat16: panel after panel, pair of inputs after pair, the outputs next to each other.
void pack_pairs(
    const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t stride_o, int64_t stride_i, uint32_t* packed
);
