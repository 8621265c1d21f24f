// Attention over the blocks of the key/value cache, of one token or of a few that follow one another, and the cache's
// layout.
//
// A block holds, for each key/value head, its keys input by input with the slots next to each other (so that the scores
// of a vector of slots are summed without crossing lanes), and its values slot by slot. Slots fill whole vectors, and so
// do the numbers of a value; what is there to fill them up is never read into a result.
#pragma once

#include <vector>

#include "vectors.h"

struct CacheShape {
    int64_t block_size, kv_heads, head_dim;

    int64_t slot_vectors() const { return (block_size + LANES - 1) / LANES; }
    int64_t value_width() const { return (head_dim + LANES - 1) / LANES * LANES; }
    int64_t keys_a_head() const { return head_dim * slot_vectors() * LANES; }
    int64_t values_a_head() const { return block_size * value_width(); }
    int64_t keys_a_block() const { return kv_heads * keys_a_head(); }
    int64_t values_a_block() const { return kv_heads * values_a_head(); }

    void write(float* keys, float* values, int64_t block, int64_t slot, const float* k, const float* v) const {
        for (int64_t head = 0; head < kv_heads; head++) {
            float* key = keys + block * keys_a_block() + head * keys_a_head() + slot;
            float* value = values + block * values_a_block() + head * values_a_head() + slot * value_width();
            for (int64_t d = 0; d < head_dim; d++) {
                key[d * slot_vectors() * LANES] = k[head * head_dim + d];
                value[d] = v[head * head_dim + d];
            }
        }
    }
};

// Tokens first..last of a sequence.
struct Seen {
    int64_t first, last;
};

// A query head of a token, what it sees, and where that goes.
struct Query {
    const float* q;
    Seen seen;
    float* out;
};

// As many as keep their sums in registers, two vectors of each.
constexpr int MOST_QUERIES = LANES >= 16 ? 8 : 4;

// The blocks of a sequence that some queries see one or the other token of.
struct Blocks {
    const int64_t* table;
    Seen seen;  // by any
    int64_t first, count;
};

// Vectors of slots at a time: enough sums under way to hide the latency of each.
template <int QUERIES>
constexpr int SCORED = QUERIES > 4 ? 2 : 4;

// The scores of up to SCORED vectors of slots, for queries that share their keys.
template <int QUERIES>
inline void score(
    const CacheShape& shape, const float* const* keys, int vectors, const Query* queries, float scale, float* scores,
    int64_t score_stride
) {
    constexpr int SCORED = ::SCORED<QUERIES>;
    Vector sum[QUERIES][SCORED] = {};
    const int64_t step = shape.slot_vectors() * LANES;
    if (vectors == SCORED) {
        for (int64_t d = 0; d < shape.head_dim; d++) {
            UNROLLED for (int v = 0; v < SCORED; v++) {
                const Vector key = load(keys[v] + d * step);
                UNROLLED for (int g = 0; g < QUERIES; g++) sum[g][v] += splat(queries[g].q[d]) * key;
            }
        }
    } else {
        for (int64_t d = 0; d < shape.head_dim; d++) {
            for (int v = 0; v < vectors; v++) {
                const Vector key = load(keys[v] + d * step);
                UNROLLED for (int g = 0; g < QUERIES; g++) sum[g][v] += splat(queries[g].q[d]) * key;
            }
        }
    }
    for (int g = 0; g < QUERIES; g++)
        for (int v = 0; v < vectors; v++) store(scores + g * score_stride + v * LANES, sum[g][v] * scale);
}

// Scores become weights that add up to 1. Slots outside of first..last get none, whatever was in them.
inline void soften(const CacheShape& shape, Seen seen, int64_t first_block, int64_t blocks, float* scores) {
    const Vector numbers = lane_numbers(), hidden = splat(-INF);
    const int64_t width = shape.slot_vectors() * LANES;
    Vector most = hidden;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t start = (first_block + b) * shape.block_size;
        const float low = float(std::max<int64_t>(seen.first - start, 0));
        const float high = float(std::min(seen.last - start, shape.block_size - 1));
        for (int64_t v = 0; v < shape.slot_vectors(); v++) {
            float* place = scores + b * width + v * LANES;
            const Vector slot = numbers + splat(float(v * LANES));
            Vector x = load(place);
            x = slot < low ? hidden : x;
            x = slot > high ? hidden : x;
            most = x > most ? x : most;
            store(place, x);
        }
    }
    const Vector peak = splat(largest_of(most));
    Vector sum = {};
    for (int64_t v = 0; v < blocks * shape.slot_vectors(); v++) {
        const Vector x = load(scores + v * LANES);
        const Vector weight = exponential(x - peak);
        store(scores + v * LANES, weight);
        sum += weight;
    }
    const Vector share = splat(1.0f / sum_of(sum));
    for (int64_t v = 0; v < blocks * shape.slot_vectors(); v++) store(scores + v * LANES, load(scores + v * LANES) * share);
}

// Values weighed, for QUERIES queries and VECTORS vectors of each. A query's weights of what it does not see are 0.
template <int QUERIES, int VECTORS>
inline void weigh(
    const CacheShape& shape, const Blocks& blocks, const float* values, int64_t head, int64_t first, const float* weights,
    int64_t weight_stride, const Query* queries
) {
    Vector sum[QUERIES][VECTORS] = {};
    const int64_t width = shape.slot_vectors() * LANES;
    for (int64_t b = 0; b < blocks.count; b++) {
        const int64_t start = (blocks.first + b) * shape.block_size;
        const float* block = values + blocks.table[blocks.first + b] * shape.values_a_block();
        block += head * shape.values_a_head() + first;
        const int64_t low = std::max<int64_t>(blocks.seen.first - start, 0);
        const int64_t high = std::min(blocks.seen.last - start, shape.block_size - 1);
        for (int64_t slot = low; slot <= high; slot++) {
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const Vector value = load(block + slot * shape.value_width() + v * LANES);
                UNROLLED for (int g = 0; g < QUERIES; g++)
                    sum[g][v] += splat(weights[g * weight_stride + b * width + slot]) * value;
            }
        }
    }
    for (int g = 0; g < QUERIES; g++) {
        for (int v = 0; v < VECTORS; v++) {
            const int64_t here = std::min<int64_t>(LANES, shape.head_dim - first - v * LANES);
            std::memcpy(queries[g].out + first + v * LANES, &sum[g][v], here * sizeof(float));
        }
    }
}

// QUERIES queries that share a key/value head of a sequence.
template <int QUERIES>
inline void attend(
    const CacheShape& shape, const int64_t* table, const float* keys, const float* values, int64_t head,
    const Query* queries, float scale, std::vector<float>& scratch
) {
    Seen seen = queries[0].seen;
    for (int g = 1; g < QUERIES; g++) {
        seen.first = std::min(seen.first, queries[g].seen.first);
        seen.last = std::max(seen.last, queries[g].seen.last);
    }
    const int64_t first_block = seen.first / shape.block_size;
    const Blocks blocks{table, seen, first_block, seen.last / shape.block_size - first_block + 1};
    const int64_t per_block = shape.slot_vectors(), vectors = blocks.count * per_block, stride = vectors * LANES;
    if (int64_t(scratch.size()) < QUERIES * stride) scratch.resize(2 * QUERIES * stride);
    float* scores = scratch.data();
    constexpr int step = SCORED<QUERIES>;
    for (int64_t v = 0; v < vectors; v += step) {
        const float* of[step];
        const int count = int(std::min<int64_t>(step, vectors - v));
        for (int n = 0; n < count; n++) {
            const int64_t block = table[first_block + (v + n) / per_block];
            of[n] = keys + block * shape.keys_a_block() + head * shape.keys_a_head() + (v + n) % per_block * LANES;
        }
        score<QUERIES>(shape, of, count, queries, scale, scores + v * LANES, stride);
    }
    for (int g = 0; g < QUERIES; g++) soften(shape, queries[g].seen, first_block, blocks.count, scores + g * stride);
    for (int64_t first = 0; first < shape.value_width();) {
        const int64_t left = (shape.value_width() - first) / LANES;
        if (QUERIES <= 4 && left >= 4) {
            weigh<QUERIES, 4>(shape, blocks, values, head, first, scores, stride, queries);
            first += 4 * LANES;
        } else if (left >= 2) {
            weigh<QUERIES, 2>(shape, blocks, values, head, first, scores, stride, queries);
            first += 2 * LANES;
        } else {
            weigh<QUERIES, 1>(shape, blocks, values, head, first, scores, stride, queries);
            first += LANES;
        }
    }
}

// Any number of them; a sum has one order, whoever shares the keys.
inline void attend_all(
    const CacheShape& shape, const int64_t* table, const float* keys, const float* values, int64_t head,
    const Query* queries, int64_t count, float scale, std::vector<float>& scratch
) {
    using Some = decltype(&attend<1>);
    static constexpr Some some[] = {attend<1>, attend<2>, attend<3>, attend<4>, attend<5>, attend<6>, attend<7>, attend<8>};
    for (int64_t done = 0; done < count;) {
        const int64_t taken = std::min<int64_t>(count - done, MOST_QUERIES);
        some[taken - 1](shape, table, keys, values, head, queries + done, scale, scratch);
        done += taken;
    }
}
