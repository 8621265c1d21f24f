// What a layer does to a row besides products: norms, rotary embedding and the gate, with their gradients.
#pragma once

#include "vectors.h"

// Calls work(start, count) for each vector's worth of a row; the last may be a part of one.
template <typename Work>
inline void by_vectors(int64_t width, const Work& work) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) work(i, int64_t(LANES));
    if (i < width) work(i, width - i);
}

inline bool all_zero(const float* numbers, int64_t count) {
    return std::all_of(numbers, numbers + count, [](float x) { return x == 0.0f; });
}

inline float norm_factor(const float* x, int64_t width, float eps) {
    Vector squares = {};
    by_vectors(width, [&](int64_t i, int64_t n) { squares += load(x + i, n) * load(x + i, n); });
    return 1.0f / std::sqrt(sum_of(squares) / float(width) + eps);
}

inline void norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
    const Vector factor = splat(norm_factor(x, width, eps));
    by_vectors(width, [&](int64_t i, int64_t n) { store(out + i, load(x + i, n) * factor * load(weight + i, n), n); });
}

// The gradient in x, from that in the normed row; added to what is in `out` where asked for. `out` may be `grad`.
inline void norm_back(
    const float* x, const float* weight, int64_t width, float eps, const float* grad, float* out, bool add
) {
    const float factor = norm_factor(x, width, eps);
    Vector along = {};
    by_vectors(width, [&](int64_t i, int64_t n) { along += load(grad + i, n) * load(weight + i, n) * load(x + i, n); });
    const Vector share = splat(sum_of(along) / float(width) * factor * factor), scale = splat(factor);
    by_vectors(width, [&](int64_t i, int64_t n) {
        const Vector found = (load(grad + i, n) * load(weight + i, n) - load(x + i, n) * share) * scale;
        store(out + i, add ? load(out + i, n) + found : found, n);
    });
}

inline void turn(float* x, const float* cosine, const float* sine, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    by_vectors(half, [&](int64_t d, int64_t n) {
        const Vector low = load(x + d, n), high = load(x + d + half, n);
        store(x + d, low * load(cosine + d, n) - high * load(sine + d, n), n);
        store(x + d + half, high * load(cosine + d + half, n) + low * load(sine + d + half, n), n);
    });
}

inline void turn_back(float* grad, const float* cosine, const float* sine, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    by_vectors(half, [&](int64_t d, int64_t n) {
        const Vector low = load(grad + d, n), high = load(grad + d + half, n);
        store(grad + d, low * load(cosine + d, n) + high * load(sine + d + half, n), n);
        store(grad + d + half, high * load(cosine + d + half, n) - low * load(sine + d, n), n);
    });
}

// A row of the embedding.
inline void embed(const float* from, int64_t width, float scale, float* out) {
    const Vector times = splat(scale);
    by_vectors(width, [&](int64_t i, int64_t n) { store(out + i, load(from + i, n) * times, n); });
}

// The norm of `added` times the weight, added to `out`.
inline void add_norm(const float* added, const float* weight, int64_t width, float eps, float* out) {
    const Vector factor = splat(norm_factor(added, width, eps));
    by_vectors(width, [&](int64_t i, int64_t n) {
        store(out + i, load(out + i, n) + load(added + i, n) * factor * load(weight + i, n), n);
    });
}

// Both gates are x / (1 + e^-z): SiLU's z is x, that of GELU by tanh is 2 sqrt(2 / pi) (x + 0.044715 x^3).
struct Silu {
    static Vector z(Vector x) { return x; }
    static Vector slope(Vector) { return splat(1.0f); }
};

struct Gelu {
    static constexpr float FIRST = 1.5957691216057308f, THIRD = 0.044715f * FIRST;
    static Vector z(Vector x) { return x * (splat(FIRST) + splat(THIRD) * x * x); }
    static Vector slope(Vector x) { return splat(FIRST) + splat(3 * THIRD) * x * x; }
};

// The gated `up`, which stands beside the gate.
template <typename Gate>
inline void gate(const float* gate_up, int64_t width, float* out) {
    by_vectors(width, [&](int64_t i, int64_t n) {
        const Vector x = load(gate_up + i, n);
        store(out + i, x / (1.0f + exponential(-Gate::z(x))) * load(gate_up + width + i, n), n);
    });
}

// The gradients of gate and up side by side, from that of what `gate` made of them.
template <typename Gate>
inline void gate_back(const float* gate_up, int64_t width, const float* grad, float* out) {
    by_vectors(width, [&](int64_t i, int64_t n) {
        const Vector x = load(gate_up + i, n), up = load(gate_up + width + i, n), g = load(grad + i, n);
        const Vector sigmoid = 1.0f / (1.0f + exponential(-Gate::z(x)));
        store(out + i, g * up * sigmoid * (1.0f + Gate::slope(x) * x * (1.0f - sigmoid)), n);
        store(out + width + i, g * x * sigmoid, n);
    });
}

inline void gate(bool gelu, const float* gate_up, int64_t width, float* out) {
    gelu ? gate<Gelu>(gate_up, width, out) : gate<Silu>(gate_up, width, out);
}

inline void gate_back(bool gelu, const float* gate_up, int64_t width, const float* grad, float* out) {
    gelu ? gate_back<Gelu>(gate_up, width, grad, out) : gate_back<Silu>(gate_up, width, grad, out);
}
