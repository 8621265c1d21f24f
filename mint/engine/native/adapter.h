// An adapter as Python holds it, and its matrices in the orders that products read them in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "matrix.h"
#include "memory.h"
#include "model.h"

// A linear that an adapter is on: A [rank, inputs] and B [outputs, rank]; the projection that it is part of, and which
// of its outputs is the linear's first.
struct AdaptedLinear {
    const float *down, *up;
    int64_t projection, first, outputs;
};

struct Adapter {
    const AdaptedLinear* linears;
    int64_t count, rank;  // of each linear
    float scale;
};

// The linears of one projection that an adapter is on.
struct Adapted {
    std::vector<const AdaptedLinear*> linears;  // by their outputs
    int64_t inputs, outputs, each;              // of the projection; the rank of one linear

    Adapted(const Decoder& decoder, const Adapter* adapter, int64_t number) : each(adapter ? adapter->rank : 0) {
        const Matrix& matrix = decoder.projection(number);
        inputs = matrix.inputs, outputs = matrix.outputs;
        for (int64_t n = 0; adapter && n < adapter->count; n++)
            if (adapter->linears[n].projection == number) linears.push_back(adapter->linears + n);
        std::sort(linears.begin(), linears.end(), [](auto* one, auto* other) { return one->first < other->first; });
    }

    int64_t rank() const { return each * int64_t(linears.size()); }
};

inline LowRank take_low_rank(const Adapted& adapted, Memory& memory) {
    const int64_t rank = adapted.rank();
    if (rank == 0) return {};
    float* down = memory.take(padded_outputs(rank) * adapted.inputs);
    float* up = memory.take(padded_outputs(adapted.outputs) * rank);
    float* ranges = memory.take(2 * panels_of(adapted.outputs) * sizeof(int64_t) / sizeof(float));
    return {down, up, reinterpret_cast<int64_t*>(ranges), rank};
}

// All A below one another, in panels of ranks.
inline void pack_down(const Adapted& adapted, float* packed) {
    const int64_t rank = adapted.rank(), inputs = adapted.inputs;
    if (rank % LANES) std::memset(packed, 0, padded_outputs(rank) * inputs * sizeof(float));
    for (int64_t column = 0; column < rank; column++) {
        const int64_t panel = column / PANEL * PANEL, width = padded_outputs(std::min(PANEL, rank - panel));
        const float* from = adapted.linears[column / adapted.each]->down + column % adapted.each * inputs;
        float* to = packed + panel * inputs + column - panel;
        for (int64_t i = 0; i < inputs; i++) to[i * width] = from[i];
    }
}

// Each B, times the scale, in the panels of outputs it belongs to; beside it, where a panel has outputs of several
// linears, nothing. A panel's range leaves out ranks at either end that are nothing altogether, as all are at first.
inline void pack_up(const Adapted& adapted, float scale, float* packed, int64_t* ranges) {
    const int64_t rank = adapted.rank(), each = adapted.each;
    for (int64_t panel = 0; panel < panels_of(adapted.outputs); panel++) {
        const int64_t start = panel * PANEL, stop = std::min(adapted.outputs, start + PANEL);
        const int64_t width = padded_outputs(stop - start);
        int64_t from = rank, to = 0;
        for (int64_t column = 0; column < rank; column++) {
            const AdaptedLinear& linear = *adapted.linears[column / each];
            const int64_t low = std::max(start, linear.first), high = std::min(stop, linear.first + linear.outputs);
            float* row = packed + start * rank + column * width;
            std::memset(row, 0, width * sizeof(float));
            for (int64_t o = low; o < high; o++)
                row[o - start] = scale * linear.up[(o - linear.first) * each + column % each];
            if (std::any_of(row, row + width, [](float x) { return x != 0.0f; }))
                from = std::min(from, column), to = column + 1;
        }
        ranges[2 * panel] = std::min(from, to), ranges[2 * panel + 1] = to;
    }
}

// For the way back: all A, in panels of inputs.
inline void pack_back_down(const Adapted& adapted, float* packed) {
    const int64_t rank = adapted.rank(), inputs = adapted.inputs;
    for (int64_t start = 0; start < inputs; start += PANEL) {
        const int64_t columns = std::min(PANEL, inputs - start), width = padded_outputs(columns);
        float* to = packed + start * rank;
        for (int64_t r = 0; r < rank; r++, to += width) {
            const float* from = adapted.linears[r / adapted.each]->down + r % adapted.each * inputs + start;
            std::memcpy(to, from, columns * sizeof(float));
            std::memset(to + columns, 0, (width - columns) * sizeof(float));
        }
    }
}

// A linear's B, times the scale, in panels of ranks.
inline void pack_back_up(const AdaptedLinear& linear, int64_t rank, float scale, float* packed) {
    for (int64_t start = 0; start < rank; start += PANEL) {
        const int64_t columns = std::min(PANEL, rank - start), width = padded_outputs(columns);
        float* to = packed + start * linear.outputs;
        for (int64_t o = 0; o < linear.outputs; o++, to += width) {
            const float* from = linear.up + o * rank + start;
            for (int64_t c = 0; c < columns; c++) to[c] = scale * from[c];
            std::memset(to + columns, 0, (width - columns) * sizeof(float));
        }
    }
}
