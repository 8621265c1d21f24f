// The products of `matrix.h`: compiled once for all who use them, because every shape of tile is code of its own.

#include "matrix.h"

#include <algorithm>
#include <type_traits>

namespace {

// Rows of a product at a time: as many sums as there are registers for, which hide the latency of each.
constexpr int tile_rows(int vectors) {
#if defined(__AVX512F__)
    return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
#else
    return vectors == 1 ? 12 : 6;
#endif
}

// Weights are asked for so many inputs ahead, so that those of a large model come from memory while others are multiplied.
constexpr int64_t AHEAD = 32;

// Inputs that are summed in one go. A long sum rounds less in pieces; with these it rounds as MKL does, which torch uses,
// so that native code and its references agree as closely as they can.
int64_t piece_of(int64_t inputs) {
    if (inputs < 384) return inputs <= 192 ? inputs : (inputs + 1) / 2;
    return 192;
}

template <int ROWS, int VECTORS, typename Input, typename Number>
void tile(
    RowsOf<Input> x, const Number* panel, int64_t step, int64_t inputs, int64_t piece, const float* bias, float* out,
    int64_t out_stride, bool add, int64_t columns
) {
    Vector total[ROWS][VECTORS];
    for (int64_t start = 0; start < inputs; start += piece) {
        const int64_t stop = std::min(inputs, start + piece);
        Vector sum[ROWS][VECTORS] = {};
        for (int64_t i = start; i < stop; i++) {
            decltype(load(panel)) weight[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = load(panel + i * step + v * LANES);
            UNROLLED for (int v = 0; v < VECTORS; v++) __builtin_prefetch(panel + (i + AHEAD) * step + v * LANES);
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const auto input = splat(x.start[r * x.stride + i]);
                UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] = added(sum[r][v], input, weight[v]);
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

template <int VECTORS, typename Input, typename Number>
void panel_product(
    RowsOf<Input> x, int64_t rows, const Number* panel, int64_t step, int64_t inputs, int64_t piece, const float* bias, float* out,
    int64_t out_stride, bool add, int64_t columns
) {
    constexpr int MOST = tile_rows(VECTORS);
    int64_t row = 0;
    const auto some = [&](auto count) {
        constexpr int ROWS = decltype(count)::value;
        tile<ROWS, VECTORS>(x.from(row), panel, step, inputs, piece, bias, out + row * out_stride, out_stride, add, columns);
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

template <int ROWS, int VECTORS>
void outer_tile(Rows left, Rows right, int64_t count, float* out, int64_t out_stride, int64_t columns) {
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
void outer_panel(
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

template <typename Input, typename Number>
void any_panel_product(
    RowsOf<Input> x, int64_t rows, const Number* panel, int64_t step, int64_t inputs, int64_t piece, const float* bias, float* out,
    int64_t out_stride, bool add, int64_t columns
) {
    switch (vectors_of(columns)) {
        case 1: panel_product<1>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
        case 2: panel_product<2>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
#if defined(__AVX512F__)
        case 3: panel_product<3>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
        case 4: panel_product<4>(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns); break;
#endif
    }
}

}  // namespace

void product(
    Rows x, int64_t rows, const float* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride, bool add,
    int64_t columns, int64_t step, int64_t piece
) {
    if (step == 0) step = padded_outputs(columns);
    if (piece == 0) piece = piece_of(inputs);
    any_panel_product(x, rows, panel, step, inputs, piece, bias, out, out_stride, add, columns);
}

void product(
    Rows x, int64_t rows, const uint16_t* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride,
    bool add, int64_t columns
) {
    const int64_t step = padded_outputs(columns);
    any_panel_product(x, rows, panel, step, inputs, piece_of(inputs), bias, out, out_stride, add, columns);
}

void product(
    PairRows x, int64_t rows, const uint32_t* panel, int64_t inputs, const float* bias, float* out, int64_t out_stride,
    bool add, int64_t columns
) {
    const int64_t step = padded_outputs(columns), piece = pairs_of(piece_of(inputs));
    any_panel_product(x, rows, panel, step, pairs_of(inputs), piece, bias, out, out_stride, add, columns);
}

void round_rows(Rows x, int64_t rows, int64_t inputs, uint32_t* out) {
    for (int64_t row = 0; row < rows; row++, out += pairs_of(inputs)) {
        const float* from = x.start + row * x.stride;
        char* to = reinterpret_cast<char*>(out);
        for (int64_t i = 0; i < inputs; i += LANES) {
            const Halves halves = rounded(load(from + i, inputs - i));
            const int64_t room = 2 * pairs_of(inputs) - i;  // behind an odd input there is a zero
            std::memcpy(to + 2 * i, &halves, 2 * std::min<int64_t>(LANES, room));
        }
    }
}

void outer(
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

void pack(const float* weight, int64_t outputs, int64_t inputs, int64_t stride_o, int64_t stride_i, float* packed) {
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t columns = std::min(PANEL, outputs - first), width = vectors_of(columns) * LANES;
        for (int64_t i = 0; i < inputs; i++) {
            for (int64_t c = 0; c < width; c++)
                packed[i * width + c] = c < columns ? weight[(first + c) * stride_o + i * stride_i] : 0.0f;
        }
        packed += inputs * width;
    }
}

void pack_pairs(
    const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t stride_o, int64_t stride_i, uint32_t* packed
) {
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t columns = std::min(PANEL, outputs - first), width = vectors_of(columns) * LANES;
        const auto at = [&](int64_t c, int64_t i) -> uint32_t {
            return c < columns && i < inputs ? weight[(first + c) * stride_o + i * stride_i] : 0;
        };
        for (int64_t pair = 0; pair < pairs_of(inputs); pair++) {
            for (int64_t c = 0; c < width; c++)
                packed[pair * width + c] = at(c, 2 * pair) | at(c, 2 * pair + 1) << 16;
        }
        packed += pairs_of(inputs) * width;
    }
}
