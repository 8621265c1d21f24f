// Products with packed matrices, each output summed in one order whatever the number of rows.
//
// A matrix of O outputs and I inputs is packed in panels of PANEL outputs (the last may be narrower, in whole vectors):
// panel after panel, input after input, the outputs next to each other. So an output's sum runs over its inputs one
// after the other, in pieces (`piece_of`) that are added in order; nothing else decides its bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

constexpr int64_t PANEL = PANEL_VECTORS * LANES;

// Rows of a product at a time: as many sums as there are registers for, which hide the latency of each.
constexpr int tile_rows(int vectors) {
#if defined(__AVX512F__)
    return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
#else
    return vectors == 1 ? 12 : 6;
#endif
}

// Inputs that are summed in one go. A long sum rounds less in pieces; with these it rounds as MKL does, which the
// trainer uses, so that the two agree as closely as they can.
inline int64_t piece_of(int64_t inputs) {
    if (inputs < 384) return inputs <= 192 ? inputs : (inputs + 1) / 2;
    return 192;
}

inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

inline int64_t vectors_of(int64_t columns) { return (columns + LANES - 1) / LANES; }

// Outputs of the panels, with those that fill up the last vector.
inline int64_t padded_outputs(int64_t outputs) { return vectors_of(outputs) * LANES; }

struct Rows {
    const float* start;
    int64_t stride;
};

template <int ROWS, int VECTORS>
inline void tile(
    Rows x, const float* panel, int64_t step, int64_t inputs, int64_t piece, const float* bias, float* out,
    int64_t out_stride, bool add, int64_t columns
) {
    Vector total[ROWS][VECTORS];
    for (int64_t start = 0; start < inputs; start += piece) {
        const int64_t stop = std::min(inputs, start + piece);
        Vector sum[ROWS][VECTORS] = {};
        for (int64_t i = start; i < stop; i++) {
            Vector weight[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = load(panel + i * step + v * LANES);
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const Vector input = splat(x.start[r * x.stride + i]);
                UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] += input * weight[v];
            }
        }
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++) total[r][v] = start ? total[r][v] + sum[r][v] : sum[r][v];
    }
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) {
            float* place = out + r * out_stride + v * LANES;
            const int64_t here = columns - v * LANES;
            if (here >= LANES) {
                if (bias) total[r][v] += load(bias + v * LANES);
                if (add) total[r][v] += load(place);
                store(place, total[r][v]);
            } else {
                for (int64_t c = 0; c < here; c++) {
                    float value = total[r][v][c];
                    if (bias) value += bias[v * LANES + c];
                    if (add) value += place[c];
                    place[c] = value;
                }
            }
        }
    }
}

template <int VECTORS>
inline void panel_product(
    Rows x, int64_t rows, const float* panel, int64_t step, int64_t inputs, int64_t piece, const float* bias, float* out,
    int64_t out_stride, bool add, int64_t columns
) {
    constexpr int MOST = tile_rows(VECTORS);
    int64_t row = 0;
    const auto some = [&](auto count) {
        constexpr int ROWS = decltype(count)::value;
        const Rows here{x.start + row * x.stride, x.stride};
        tile<ROWS, VECTORS>(here, panel, step, inputs, piece, bias, out + row * out_stride, out_stride, add, columns);
        row += ROWS;
    };
    while (rows - row >= MOST) some(std::integral_constant<int, MOST>{});
    if (rows - row >= 6) some(std::integral_constant<int, 6>{});
    switch (rows - row) {
        case 5: some(std::integral_constant<int, 5>{}); break;
        case 4: some(std::integral_constant<int, 4>{}); break;
        case 3: some(std::integral_constant<int, 3>{}); break;
        case 2: some(std::integral_constant<int, 2>{}); break;
        case 1: some(std::integral_constant<int, 1>{}); break;
    }
}

// The rows times the first `columns` (at most PANEL) of a panel: out = x W (+ bias) (+ out). `step`: floats from one
// input's weights to the next one's, as many as the columns fill unless told otherwise; `piece`: inputs summed in one go.
inline void product(
    Rows x, int64_t rows, const float* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride, bool add,
    int64_t columns, int64_t step = 0, int64_t piece = 0
) {
    if (step == 0) step = padded_outputs(columns);
    if (piece == 0) piece = piece_of(inputs);
    switch (vectors_of(columns)) {
        case 1: panel_product<1>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
        case 2: panel_product<2>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
#if defined(__AVX512F__)
        case 3: panel_product<3>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
        case 4: panel_product<4>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
#endif
    }
}

template <int ROWS, int VECTORS>
inline void outer_tile(Rows left, Rows right, int64_t count, float* out, int64_t out_stride, int64_t columns) {
    Vector sum[ROWS][VECTORS] = {};
    for (int64_t n = 0; n < count; n++) {
        Vector weight[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = load(right.start + n * right.stride + v * LANES);
        UNROLLED for (int r = 0; r < ROWS; r++) {
            const Vector input = splat(left.start[n * left.stride + r]);
            UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] += input * weight[v];
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) {
            float* place = out + r * out_stride + v * LANES;
            const int64_t here = columns - v * LANES;
            store(place, load(place, here) + sum[r][v], here);
        }
    }
}

template <int VECTORS>
inline void outer_panel(
    Rows left, int64_t left_columns, Rows right, int64_t count, float* out, int64_t out_stride, int64_t columns
) {
    constexpr int MOST = tile_rows(VECTORS);
    int64_t row = 0;
    const auto piece = [&](auto rows) {
        constexpr int ROWS = decltype(rows)::value;
        const Rows here{left.start + row, left.stride};
        outer_tile<ROWS, VECTORS>(here, right, count, out + row * out_stride, out_stride, columns);
        row += ROWS;
    };
    while (left_columns - row >= MOST) piece(std::integral_constant<int, MOST>{});
    while (left_columns - row >= 4) piece(std::integral_constant<int, 4>{});
    while (left_columns - row >= 1) piece(std::integral_constant<int, 1>{});
}

// out += left^T right over `count` rows of each; each output is summed over the rows in order. Reads whole vectors of
// `right`, so up to a vector beyond its last number.
inline void outer(
    Rows left, int64_t left_columns, Rows right, int64_t right_columns, int64_t count, float* out, int64_t out_stride
) {
    for (int64_t first = 0; first < right_columns; first += PANEL) {
        const Rows from{right.start + first, right.stride};
        const int64_t columns = std::min(PANEL, right_columns - first);
        switch (vectors_of(columns)) {
            case 1: outer_panel<1>(left, left_columns, from, count, out + first, out_stride, columns); break;
            case 2: outer_panel<2>(left, left_columns, from, count, out + first, out_stride, columns); break;
#if defined(__AVX512F__)
            case 3: outer_panel<3>(left, left_columns, from, count, out + first, out_stride, columns); break;
            case 4: outer_panel<4>(left, left_columns, from, count, out + first, out_stride, columns); break;
#endif
        }
    }
}

// `weight` lies output by output, `stride_i` 1, or input by input, `stride_o` 1.
inline void pack(const float* weight, int64_t outputs, int64_t inputs, int64_t stride_o, int64_t stride_i, float* packed) {
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t columns = std::min(PANEL, outputs - first), width = vectors_of(columns) * LANES;
        for (int64_t i = 0; i < inputs; i++) {
            for (int64_t c = 0; c < width; c++)
                packed[i * width + c] = c < columns ? weight[(first + c) * stride_o + i * stride_i] : 0.0f;
        }
        packed += inputs * width;
    }
}
