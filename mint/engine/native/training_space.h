// What a training pass is given, what it keeps for the way back, and where all of it lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "training_adapter.h"

// A projection's weight for the way back. Plain, as the model holds it: output by output, in rows of `step` floats, whole
// vectors of which may be read. Or, with a `step` of 0, packed in panels of inputs. Or in pairs of outputs, in such panels.
struct Back {
    const float* weight;
    const uint32_t* pairs;
    int64_t outputs, inputs, step;
};

struct Model {
    const Decoder* decoder;
    const Back* back;             // four a layer, then the unembedding's
    const float* unembedding_VH;  // plain
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
    const Adapter* adapter;  // or none
    int64_t keep;            // there will be a backward pass
    int64_t lean;            // it computes each layer again
    float* memory;
};

constexpr int64_t ROW_BLOCK = 96;  // rows that go through a half layer together

// Calls work(first, rows) for each block of the rows start..stop-1.
template <typename Work>
inline void by_row_blocks(int64_t start, int64_t stop, const Work& work) {
    for (int64_t first = start; first < stop; first += ROW_BLOCK) work(first, std::min(ROW_BLOCK, stop - first));
}

// Of one layer, for its backward pass: its input, the heads before their norm, turned, what attention saw and its
// masses, the residual stream in the middle, gate and up, what each half adds before the norm of that, if it has one, and
// the rows reduced by each projection's adapter.
struct Kept {
    float *x, *heads, *qkv, *seen, *mass, *middle, *gate_up, *attended, *passed;
    float* low[PROJECTIONS];
};

struct Space {
    std::vector<Kept> layers;
    float *last, *hidden, *means;
    float* powers;  // of e, from the live rows' logits, where they are kept...
    double* sums;   // ...and what they add up to
    float *normed, *wide, *narrow, *added, *low, *logits;  // of a block
    uint32_t* pairs;                                       // what a product reads of a block, where it reads pairs
    float *grad, *grad_qkv, *grad_seen;

    Space(const Model& model, const MicroBatch& batch, const TrainedAdapter& adapter, Memory& memory) {
        const Decoder& d = *model.decoder;
        const int64_t rows = batch.rows, block = std::min(rows, ROW_BLOCK), heads = d.heads * d.head_dim;
        const int64_t both = heads + d.kv_heads * d.head_dim, qkv = both + d.kv_heads * d.head_dim;
        const int64_t most_rank = adapter.most_rank(), before = memory.used();
        layers.resize(d.num_layers);
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
            kept.attended = d.layers[n].attention_norm ? memory.take(rows * d.hidden) : nullptr;
            kept.passed = d.layers[n].gated_norm ? memory.take(rows * d.hidden) : nullptr;
            for (float*& low : kept.low) low = memory.take(rows * most_rank);
        }
        // With an adapter of its own the unembedding's logits are needed on the way back: kept if that is little beside
        // the rest, computed again if it is not.
        const int64_t kept_of_a_row = (memory.used() - before) / std::max<int64_t>(1, rows);
        const bool keeps = adapter.part(PROJECTIONS * d.num_layers) && d.unembedding.outputs <= kept_of_a_row / 2;
        const int64_t kept_rows = batch.keep && !batch.lean && keeps ? batch.live : 0;
        powers = kept_rows ? memory.take(kept_rows * d.unembedding.outputs) : nullptr;
        sums = kept_rows ? reinterpret_cast<double*>(memory.take(kept_rows * sizeof(double) / sizeof(float))) : nullptr;
        last = batch.keep ? memory.take(rows * d.hidden) : layers[0].x;
        hidden = memory.take(rows * d.hidden);
        normed = memory.take(block * d.hidden);
        wide = memory.take(block * 2 * d.intermediate);
        narrow = memory.take(block * std::max(d.hidden, d.intermediate));
        added = memory.take(block * d.hidden);
        low = memory.take(block * most_rank);
        logits = memory.take(block * d.unembedding.outputs);
        const int64_t widest = std::max({d.unembedding.outputs, qkv, 2 * d.intermediate, d.hidden});
        pairs = d.unembedding.pairs ? reinterpret_cast<uint32_t*>(memory.take(block * pairs_of(widest))) : nullptr;
        if (batch.keep) {
            means = memory.take(batch.live * d.hidden);
            grad = memory.take(rows * d.hidden);
            grad_qkv = memory.take(rows * qkv);
            grad_seen = memory.take(rows * heads);
        }
    }
};
