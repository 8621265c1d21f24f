// What a decoder is made of, as `structures.py` hands it over, field by field.
#pragma once

#include <cstdint>

struct Matrix {
    const float* packed;
    const float* bias;
    int64_t outputs, inputs;
};

struct Layer {
    const float *input_norm, *head_norm, *mlp_norm;
    Matrix qkv, out, gate_up, down;
    int64_t window;  // 0: none
    float *keys, *values;
};

struct Decoder {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, block_size;
    float eps, scale;
    const float *embedding, *final_norm, *cosine, *sine;
    Layer* layers;
    Matrix unembedding;
};

// An adapter's part of one projection: all of its linears' A below each other, and their B in the panels of the
// projection's outputs. A panel's inputs are those of the linears whose outputs it holds: from..to of `ranges`.
struct LowRank {
    const float *down, *up;
    const int64_t* ranges;
    int64_t rank;
};

// The projections of a layer, in the order of its adapters' parts: four a layer, then the unembedding's.
enum Projection { QKV, OUT, GATE_UP, DOWN, PROJECTIONS };
