// A decoder's pass over packed rows of tokens, in float32 on a CPU: what `mint.engine.fused` does in torch, in one call.
//
// What a row computes depends on its own numbers alone, in one fixed order, whatever the number of rows, the adapters
// of the others or the threads. The structures are those of `structures.py`, field by field.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "adapter.h"
#include "attention.h"
#include "draw.h"
#include "pool.h"
#include "projection.h"
#include "rows.h"

namespace {

// Rows that stand next to each other and have one adapter: its LowRanks, four a layer and the unembedding's; or none.
struct Run {
    const LowRank* adapter;
    int64_t rows;
};

struct Batch {
    int64_t rows;
    const int64_t *tokens, *positions;
    const int64_t* lines;  // which block table is each row's
    const int64_t* tables;
    int64_t table_width;
    const Run* runs;
    int64_t num_runs;
    int64_t threads;
};

constexpr int64_t ROW_PIECE = 8;       // rows of one piece of row-wise work
constexpr int64_t ROW_BLOCK = 96;      // rows of one piece of a product: their inputs stay in the nearest caches
constexpr int64_t PANELS_A_PIECE = 2;
// Multiplications, and numbers to be fetched from memory, below which a second thread is not worth asking.
constexpr int64_t SHARED_WORK = 1 << 21, SHARED_NUMBERS = 1 << 18;
constexpr int64_t LOGIT_ROWS = 96;     // rows whose logits exist at once while everybody draws

struct Buffer {
    std::vector<float> numbers;
    int64_t width = 0;

    void shape(int64_t rows, int64_t columns) {
        width = columns;
        if (int64_t(numbers.size()) < rows * columns) numbers.resize(rows * columns);
    }
    float* row(int64_t n) { return numbers.data() + n * width; }
    Rows from(int64_t n) { return {row(n), width}; }
};

// What a pass writes on its way; kept by each thread that calls for the next one.
struct Workspace {
    Buffer x, normed, low, qkv, seen, gate_up, gated, added, hidden, logits;
    std::vector<uint32_t> pairs;
};

class Pass {
public:
    Pass(const Decoder& decoder, const Run* runs, int64_t num_runs, int64_t rows, Pool::Step& step, Workspace& space)
        : decoder_(decoder), runs_(runs), num_runs_(num_runs), rows_(rows), step_(step), space_(space) {}

    void hidden(const Batch& batch, float* out) {
        const int64_t width = decoder_.hidden;
        space_.x.shape(rows_, width);
        space_.normed.shape(rows_, width);
        space_.seen.shape(rows_, decoder_.heads * decoder_.head_dim);
        space_.gated.shape(rows_, decoder_.intermediate);
        space_.qkv.shape(rows_, decoder_.layers[0].qkv.outputs);
        space_.gate_up.shape(rows_, 2 * decoder_.intermediate);
        by_rows([&](int64_t row) {
            embed(decoder_.embedding + batch.tokens[row] * width, width, decoder_.embedding_scale, space_.x.row(row));
        });
        for (int64_t number = 0; number < decoder_.num_layers; number++) layer(number, batch);
        by_rows([&](int64_t row) { norm(space_.x.row(row), decoder_.final_norm, width, decoder_.eps, out + row * width); });
    }

    // out = x W + bias + up(down x), and what was in `out` too where it is to be added.
    void project(const Matrix& matrix, int64_t projection, Rows x, float* out, bool add) {
        reduce(projection, x, matrix.inputs);
        const Inputs from = inputs_of(matrix, x);
        const int64_t panels = panels_of(matrix.outputs), across = (panels + PANELS_A_PIECE - 1) / PANELS_A_PIECE;
        const int64_t blocks = (rows_ + ROW_BLOCK - 1) / ROW_BLOCK;
        const int64_t weights = matrix.outputs * matrix.inputs;
        const bool worthwhile = rows_ * weights >= SHARED_WORK || weights >= SHARED_NUMBERS;
        step_.share(across * blocks, worthwhile, [&](int64_t piece) {
            const int64_t first = piece / across * ROW_BLOCK, rows = std::min(ROW_BLOCK, rows_ - first);
            const int64_t start = piece % across * PANELS_A_PIECE;
            for (int64_t panel = start; panel < std::min(panels, start + PANELS_A_PIECE); panel++)
                project_panel(matrix, projection, panel, from, first, rows, out, add);
        });
    }

    void unembed(Rows hidden, float* logits) {
        project(decoder_.unembedding, PROJECTIONS * decoder_.num_layers, hidden, logits, false);
    }

private:
    void layer(int64_t number, const Batch& batch) {
        const Layer& layer = decoder_.layers[number];
        Workspace& space = space_;
        by_rows([&](int64_t row) {
            norm(space.x.row(row), layer.input_norm, decoder_.hidden, decoder_.eps, space.normed.row(row));
        });
        project(layer.qkv, 4 * number + QKV, space.normed.from(0), space.qkv.row(0), false);
        // All keys and values are written before any are read: rows of one step may look at each other.
        by_rows([&](int64_t row) { place(layer, batch, row); });
        look(layer, batch);
        add(layer.out, 4 * number + OUT, space.seen.from(0), layer.attention_norm);
        by_rows([&](int64_t row) {
            norm(space.x.row(row), layer.mlp_norm, decoder_.hidden, decoder_.eps, space.normed.row(row));
        });
        project(layer.gate_up, 4 * number + GATE_UP, space.normed.from(0), space.gate_up.row(0), false);
        by_rows([&](int64_t row) {
            gate(decoder_.gelu, space.gate_up.row(row), decoder_.intermediate, space.gated.row(row));
        });
        add(layer.down, 4 * number + DOWN, space.gated.from(0), layer.gated_norm);
    }

    // A projection to the residual stream, through a norm if there is one.
    void add(const Matrix& matrix, int64_t projection, Rows x, const float* norm) {
        if (!norm) return project(matrix, projection, x, space_.x.row(0), true);
        space_.added.shape(rows_, matrix.outputs);
        project(matrix, projection, x, space_.added.row(0), false);
        by_rows([&](int64_t row) {
            add_norm(space_.added.row(row), norm, matrix.outputs, decoder_.eps, space_.x.row(row));
        });
    }

    CacheShape cache() const { return {decoder_.block_size, decoder_.kv_heads, decoder_.head_dim}; }

    // Turns the queries and keys of a row and writes its keys and values to the cache.
    void place(const Layer& layer, const Batch& batch, int64_t row) {
        const int64_t size = decoder_.head_dim, both = decoder_.heads + decoder_.kv_heads, position = batch.positions[row];
        float* qkv = space_.qkv.row(row);
        for (int64_t head = 0; head < both; head++) {
            float* x = qkv + head * size;
            if (layer.head_norm) norm(x, layer.head_norm + head * size, size, decoder_.eps, x);
            turn(x, layer.cosine + position * size, layer.sine + position * size, size);
        }
        const int64_t block = batch.tables[batch.lines[row] * batch.table_width + position / decoder_.block_size];
        cache().write(
            layer.keys, layer.values, block, position % decoder_.block_size, qkv + decoder_.heads * size, qkv + both * size
        );
    }

    // In pieces of one head, because a single row may have much to look at. Rows of a prompt that follow one another
    // share the keys they read, as far as they go into one piece.
    void look(const Layer& layer, const Batch& batch) {
        const int64_t heads = decoder_.kv_heads, group = decoder_.heads / heads;
        const int64_t together = std::max<int64_t>(1, MOST_QUERIES / group);
        starts_.clear();
        int64_t tokens = 0;
        for (int64_t row = 0; row < rows_; row++) {
            tokens += batch.positions[row] - first_seen(layer, batch, row) + 1;
            if (starts_.empty() || row - starts_.back() == together || !follows(batch, row)) starts_.push_back(row);
        }
        const bool worthwhile = many_rows() || 2 * tokens * heads * decoder_.head_dim >= SHARED_NUMBERS;
        const int64_t runs = int64_t(starts_.size());
        const int64_t runs_a_piece = many_rows() ? std::max<int64_t>(1, ROW_PIECE * runs / rows_) : 1;
        starts_.push_back(rows_);
        step_.share((runs + runs_a_piece - 1) / runs_a_piece * heads, worthwhile, [&](int64_t piece) {
            const int64_t first = piece / heads * runs_a_piece, stop = std::min(runs, first + runs_a_piece);
            for (int64_t run = first; run < stop; run++)
                look(layer, batch, starts_[run], starts_[run + 1], piece % heads);
        });
    }

    static bool follows(const Batch& batch, int64_t row) {
        return batch.lines[row] == batch.lines[row - 1] && batch.positions[row] == batch.positions[row - 1] + 1;
    }

    void look(const Layer& layer, const Batch& batch, int64_t first, int64_t stop, int64_t head) {
        static thread_local std::vector<float> scratch;
        static thread_local std::vector<Query> queries;
        queries.clear();
        const int64_t group = decoder_.heads / decoder_.kv_heads;
        for (int64_t row = first; row < stop; row++) {
            const Seen seen{first_seen(layer, batch, row), batch.positions[row]};
            for (int64_t query = head * group; query < (head + 1) * group; query++) {
                const int64_t at = query * decoder_.head_dim;
                queries.push_back({space_.qkv.row(row) + at, seen, space_.seen.row(row) + at});
            }
        }
        const int64_t* table = batch.tables + batch.lines[first] * batch.table_width;
        attend_all(
            cache(), table, layer.keys, layer.values, head, queries.data(), int64_t(queries.size()), decoder_.scale, scratch
        );
    }

    static int64_t first_seen(const Layer& layer, const Batch& batch, int64_t row) {
        return layer.window ? std::max<int64_t>(0, batch.positions[row] - layer.window + 1) : 0;
    }

    // The rows of each run through its adapter's A.
    void reduce(int64_t projection, Rows x, int64_t inputs) {
        int64_t most = 0;
        for (int64_t r = 0; r < num_runs_; r++)
            if (runs_[r].adapter) most = std::max(most, runs_[r].adapter[projection].rank);
        if (most == 0) return;
        space_.low.shape(rows_, most);
        const int64_t pieces = (rows_ + ROW_BLOCK / 4 - 1) / (ROW_BLOCK / 4);
        step_.share(pieces, rows_ * most * inputs >= SHARED_WORK / 4, [&](int64_t piece) {
            const int64_t first = piece * (ROW_BLOCK / 4), rows = std::min(ROW_BLOCK / 4, rows_ - first);
            by_runs(first, rows, [&](const LowRank* adapter, int64_t row, int64_t count) {
                ::reduce(adapter[projection], x.from(row), count, inputs, space_.low.row(row), space_.low.width);
            });
        });
    }

    Inputs inputs_of(const Matrix& matrix, Rows x) {
        if (!matrix.pairs) return {x, {}};
        const int64_t pairs = pairs_of(matrix.inputs);
        if (int64_t(space_.pairs.size()) < rows_ * pairs) space_.pairs.resize(rows_ * pairs);
        uint32_t* room = space_.pairs.data();
        by_rows([&](int64_t row) { ::inputs_of(matrix, x.from(row), 1, room + row * pairs); });
        return {x, {room, pairs}};
    }

    void project_panel(
        const Matrix& matrix, int64_t projection, int64_t panel, Inputs from, int64_t first, int64_t rows, float* out,
        bool add
    ) {
        ::project_panel(matrix, panel, from.from(first), rows, out + first * matrix.outputs, add);
        by_runs(first, rows, [&](const LowRank* adapter, int64_t row, int64_t count) {
            const Rows reduced{space_.low.row(row), space_.low.width};
            widen(adapter[projection], panel, reduced, count, out + row * matrix.outputs, matrix.outputs);
        });
    }

    // The parts of rows first..first+rows-1 that have an adapter.
    template <typename Work>
    void by_runs(int64_t first, int64_t rows, const Work& work) {
        int64_t start = 0;
        for (int64_t r = 0; r < num_runs_ && start < first + rows; start += runs_[r++].rows) {
            const int64_t from = std::max(start, first), to = std::min(start + runs_[r].rows, first + rows);
            if (from < to && runs_[r].adapter) work(runs_[r].adapter, from, to - from);
        }
    }

    bool many_rows() const { return rows_ >= 4 * ROW_PIECE; }

    template <typename Work>
    void by_rows(const Work& work) {
        step_.share((rows_ + ROW_PIECE - 1) / ROW_PIECE, many_rows(), [&](int64_t piece) {
            for (int64_t row = piece * ROW_PIECE; row < std::min(rows_, (piece + 1) * ROW_PIECE); row++) work(row);
        });
    }

    const Decoder& decoder_;
    const Run* runs_;
    const int64_t num_runs_, rows_;
    Pool::Step& step_;
    Workspace& space_;
    std::vector<int64_t> starts_;  // of rows that look together
};

// The runs of the rows first..first+rows-1.
std::vector<Run> runs_of(const Batch& batch, int64_t first, int64_t rows) {
    std::vector<Run> runs;
    int64_t start = 0;
    for (int64_t r = 0; r < batch.num_runs; start += batch.runs[r++].rows) {
        const int64_t from = std::max(start, first), to = std::min(start + batch.runs[r].rows, first + rows);
        if (from < to) runs.push_back({batch.runs[r].adapter, to - from});
    }
    return runs;
}

Workspace& workspace() {
    static thread_local Workspace space;
    return space;
}

void draw_rows(
    Pool::Step& step, const float* logits, int64_t rows, int64_t vocabulary, const float* temperature,
    const double* uniform, int64_t* tokens, float* logprobs
) {
    step.share(rows, rows * vocabulary >= 1 << 16, [&](int64_t row) {
        const Draw drawn = draw(logits + row * vocabulary, vocabulary, temperature[row], uniform[row]);
        tokens[row] = drawn.token, logprobs[row] = drawn.logprob;
    });
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

int64_t mint_lanes() { return LANES; }
int64_t mint_padded(int64_t outputs) { return padded_outputs(outputs); }

void mint_pack(const float* weight_OI, int64_t outputs, int64_t inputs, float* packed) {
    pack(weight_OI, outputs, inputs, inputs, 1, packed);
}

void mint_pack_pairs(const uint16_t* weight_OI, int64_t outputs, int64_t inputs, uint32_t* packed) {
    pack_pairs(weight_OI, outputs, inputs, inputs, 1, packed);
}

// Whether the processor multiplies pairs itself, two products at a time.
int64_t mint_multiplies_pairs() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// How many floats of memory an adapter's packed matrices want.
int64_t mint_adapter_memory(const Decoder* decoder, const Adapter* adapter) {
    Memory memory(nullptr);
    for (int64_t number = 0; number < decoder->projections(); number++)
        take_low_rank(Adapted(*decoder, adapter, number), memory);
    return memory.used();
}

// `parts`: one for each projection.
void mint_pack_adapter(const Decoder* decoder, const Adapter* adapter, float* room, LowRank* parts) {
    Memory memory(room);
    for (int64_t number = 0; number < decoder->projections(); number++) {
        const Adapted adapted(*decoder, adapter, number);
        parts[number] = take_low_rank(adapted, memory);
        if (!parts[number].rank) continue;
        pack_down(adapted, parts[number].down);
        pack_up(adapted, adapter->scale, parts[number].up, parts[number].ranges);
    }
}

// The final hidden states, after the last norm; keys and values are in the cache by then.
void mint_hidden(const Decoder* decoder, const Batch* batch, float* hidden) {
    Pool::Step step(batch->threads);
    Pass(*decoder, batch->runs, batch->num_runs, batch->rows, step, workspace()).hidden(*batch, hidden);
}

// A token for each row, behind the one it reads: hidden states, logits and draw, with helpers awake throughout.
void mint_decode(
    const Decoder* decoder, const Batch* batch, const float* temperature, const double* uniform, int64_t* tokens,
    float* logprobs
) {
    Pool::Step step(batch->threads);
    Workspace& space = workspace();
    const int64_t vocabulary = decoder->unembedding.outputs;
    space.hidden.shape(batch->rows, decoder->hidden);
    Pass(*decoder, batch->runs, batch->num_runs, batch->rows, step, space).hidden(*batch, space.hidden.row(0));
    for (int64_t first = 0; first < batch->rows; first += LOGIT_ROWS) {
        const int64_t rows = std::min(LOGIT_ROWS, batch->rows - first);
        const std::vector<Run> runs = runs_of(*batch, first, rows);
        space.logits.shape(rows, vocabulary);
        float* logits = space.logits.row(0);
        Pass(*decoder, runs.data(), int64_t(runs.size()), rows, step, space).unembed(space.hidden.from(first), logits);
        draw_rows(
            step, logits, rows, vocabulary, temperature + first, uniform + first, tokens + first, logprobs + first
        );
    }
}

void mint_logits(
    const Decoder* decoder, const float* hidden, int64_t rows, const Run* runs, int64_t num_runs, int64_t threads,
    float* logits
) {
    Pool::Step step(threads);
    const Rows from{hidden, decoder->hidden};
    Pass(*decoder, runs, num_runs, rows, step, workspace()).unembed(from, logits);
}

void mint_draw(
    const float* logits, int64_t rows, int64_t vocabulary, const float* temperature, const double* uniform, int64_t threads,
    int64_t* tokens, float* logprobs
) {
    Pool::Step step(threads);
    draw_rows(step, logits, rows, vocabulary, temperature, uniform, tokens, logprobs);
}

}  // extern "C"

#pragma GCC visibility pop
