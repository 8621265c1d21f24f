// What a decoder is made of, as `structures.py` hands it over, field by field.
#pragma once

#include <cstdint>

// Of its weights only the pairs where products are computed in bfloat16.
struct Matrix {
    const float* packed;
    const uint16_t* halves;  // the same in bfloat16, where that loses nothing
    const uint32_t* pairs;   // the same in pairs of inputs
    const float* bias;
    int64_t outputs, inputs;
};

// The projections of a layer, in the order of its adapters' parts: four a layer, then the unembedding's.
enum Projection { QKV, OUT, GATE_UP, DOWN, PROJECTIONS };

struct Layer {
    const float *input_norm, *head_norm, *mlp_norm;
    const float *attention_norm, *gated_norm;  // of what each half adds to the residual stream, where there are such
    const float *cosine, *sine;                // of every position
    Matrix qkv, out, gate_up, down;
    int64_t window;  // 0: none
    float *keys, *values;
};

struct Decoder {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, block_size;
    int64_t gelu;  // the gate is GELU by tanh, and not SiLU
    float eps, scale, embedding_scale;
    const float *embedding, *final_norm;
    Layer* layers;
    Matrix unembedding;

    int64_t projections() const { return PROJECTIONS * num_layers + 1; }
    const Matrix& projection(int64_t number) const {
        if (number == PROJECTIONS * num_layers) return unembedding;
        const Layer& layer = layers[number / PROJECTIONS];
        const Matrix* matrices[] = {&layer.qkv, &layer.out, &layer.gate_up, &layer.down};
        return *matrices[number % PROJECTIONS];
    }
};

// An adapter's part of one projection: all of its linears' A below each other, and their B in the panels of the
// projection's outputs. A panel's inputs are those of the linears whose outputs it holds: from..to of `ranges`.
struct LowRank {
    float *down, *up;
    int64_t* ranges;
    int64_t rank;
};
