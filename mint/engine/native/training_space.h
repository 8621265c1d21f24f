// What a training pass is given, what it keeps for the way back, and where all of it lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "training_adapter.h"
#include "tree_attention.h"

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
    int64_t threads;         // at most so many compute it; they decide no bit
    float* memory;
};

// Rows that go through a half layer together; the blocks of a pass are numbered.
struct RowBlock {
    int64_t number, first, rows;
};

constexpr int64_t ROW_BLOCK = 96;  // rows of one, at most...
constexpr int64_t ROW_TILE = 6;    // ...in whole tiles of products, but for the last
constexpr int64_t UNDIVIDED = 48;  // as many rows or fewer are one block

// How many blocks there are of so many rows: an even number, as cores come in pairs.
inline int64_t blocks_of(int64_t rows) {
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    return rows <= UNDIVIDED ? blocks : blocks + blocks % 2;
}

// Of one layer, for its backward pass: its input, the heads before their norm, turned, what attention saw and its
// masses, the residual stream in the middle, gate and up, what each half adds before the norm of that, if it has one, and
// the rows reduced by each projection's adapter.
struct Kept {
    float *x, *heads, *qkv, *seen, *mass, *middle, *gate_up, *attended, *passed;
    float* low[PROJECTIONS];
};

// What a thread needs for the block it is at.
struct Bench {
    float *normed, *wide, *narrow, *added, *low, *logits;
    uint32_t* pairs;  // what a product reads of a block, where it reads pairs
    AttentionRoom attention;
    std::atomic<bool> taken{false};
};

struct Space {
    std::vector<Kept> layers;
    float *last, *hidden, *means;
    float* powers;  // of e, from the live rows' logits, where they are kept...
    double* sums;   // ...and what they add up to
    float *grad, *grad_qkv, *grad_seen;

    Space(const Model& model, const MicroBatch& batch, const TrainedAdapter& adapter, Memory& memory)
        : benches_(batch.threads) {
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
        const int64_t widest = std::max({d.unembedding.outputs, qkv, 2 * d.intermediate, d.hidden});
        for (Bench& bench : benches_) {
            bench.normed = memory.take(block * d.hidden);
            bench.wide = memory.take(block * 2 * d.intermediate);
            bench.narrow = memory.take(block * std::max(d.hidden, d.intermediate));
            bench.added = memory.take(block * d.hidden);
            bench.low = memory.take(block * most_rank);
            bench.logits = memory.take(block * d.unembedding.outputs);
            bench.pairs = nullptr;
            if (d.unembedding.pairs) bench.pairs = reinterpret_cast<uint32_t*>(memory.take(block * pairs_of(widest)));
        }
        if (batch.keep) {
            means = memory.take(batch.live * d.hidden);
            grad = memory.take(rows * d.hidden);
            grad_qkv = memory.take(rows * qkv);
            grad_seen = memory.take(rows * heads);
        }
    }

    // Calls work(bench) with a bench that nobody else is at. There are as many as threads; one that comes late from a
    // step that is over may have to wait.
    template <typename Work>
    void at_a_bench(const Work& work) {
        Bench* mine = nullptr;
        wait_until([&] {
            for (Bench& bench : benches_)
                if (!bench.taken.exchange(true, std::memory_order_acquire)) return mine = &bench, true;
            return false;
        });
        work(*mine);
        mine->taken.store(false, std::memory_order_release);
    }

private:
    std::vector<Bench> benches_;
};

// The threads of a pass, and how its work is divided among them.
class Crew {
public:
    Crew(int64_t threads, Space& space) : step_(threads), space_(space) {}

    // Calls work(piece, bench) for the pieces 0..count-1, begun in this order.
    template <typename Work>
    void by_pieces(int64_t count, const Work& work) {
        step_.share(count, true, [&](int64_t piece) { space_.at_a_bench([&](Bench& bench) { work(piece, bench); }); });
    }

    // Calls work(block, bench) for blocks of about the same size of the rows start..stop-1.
    template <typename Work>
    void by_blocks(int64_t start, int64_t stop, const Work& work) {
        const int64_t rows = stop - start, blocks = blocks_of(rows), tiles = (rows + ROW_TILE - 1) / ROW_TILE;
        by_pieces(blocks, [&](int64_t number, Bench& bench) {
            const int64_t first = number * tiles / blocks * ROW_TILE;
            const int64_t last = std::min(rows, (number + 1) * tiles / blocks * ROW_TILE);
            work(RowBlock{number, start + first, last - first}, bench);
        });
    }

private:
    Pool::Step step_;
    Space& space_;
};
