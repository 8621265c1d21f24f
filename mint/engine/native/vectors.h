// Vectors of floats, as wide as the processor's, and the few functions of them the decoder needs.
//
// GCC's and Clang's vector types rather than intrinsics: one source for AVX-512, AVX2, SSE and NEON.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int PANEL_VECTORS = 4;  // 6 rows of them and what they are multiplied with fill the 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int PANEL_VECTORS = 2;  // of 16 registers
#else
constexpr int LANES = 4;
constexpr int PANEL_VECTORS = 2;
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

constexpr float INF = std::numeric_limits<float>::infinity();

// Accumulators stay in registers only if the loops over them are gone.
#define UNROLLED _Pragma("GCC unroll 16")

inline Vector load(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Vector as_floats(Bits bits) {
    Vector x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Floats whose lower halves are 0, from their upper ones.
inline Vector load(const uint16_t* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return as_floats(__builtin_convertvector(halves, Bits) << 16);
}

// Of each lane two numbers in bfloat16, the first in the lower half.
inline Bits load(const uint32_t* from) {
    Bits x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

// The first `count` lanes; the others are 0.
inline Vector load(const float* from, int64_t count) {
    if (count >= LANES) return load(from);
    Vector x = {};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}

inline void store(float* to, Vector x, int64_t count) {
    std::memcpy(to, &x, std::min<int64_t>(count, LANES) * sizeof(float));
}

inline Vector splat(float x) { return x - Vector{}; }
inline Bits splat(uint32_t x) { return x - Bits{}; }

// The sum with a product more...
inline Vector added(Vector sum, Vector x, Vector y) { return sum + x * y; }

// ...or with those of both numbers in bfloat16, which lose nothing.
inline Vector added(Vector sum, Bits x, Bits y) {
#if defined(__AVX512BF16__)
    return Vector(_mm512_dpbf16_ps(__m512(sum), __m512bh(x), __m512bh(y)));
#else
    const Bits upper = splat(0xffff0000u);
    sum += as_floats(x & upper) * as_floats(y & upper);
    return sum + as_floats(x << 16) * as_floats(y << 16);
#endif
}

// The nearest in bfloat16, the even one of two; what is not a number stays so.
inline Halves rounded(Vector x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof x);
    const Bits nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? nearest : splat(0x7fc0u), Halves);
}

inline Vector lane_numbers() {
    Vector x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = float(lane);
    return x;
}

// In one fixed order: halves of the lanes onto each other.
inline float sum_of(Vector x) {
    float lane[LANES];
    store(lane, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

inline float largest_of(Vector x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

// e^x to about one unit in the last place for x <= 88; 0 below -87; what is not a number stays so.
inline Vector exponential(Vector x) {
    const Vector floor = splat(-87.0f), ceiling = splat(88.0f), none = {};
    const Integers vanishes = x < floor;
    x = vanishes ? floor : x;
    x = x > ceiling ? ceiling : x;
    // 2^n * e^r with |r| <= ln(2) / 2; adding 1.5 * 2^23 rounds to a whole number.
    const Vector shift = splat(12582912.0f);
    const Vector n = (x * splat(1.44269504088896341f) + shift) - shift;
    Vector r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    Vector p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &power, sizeof scale);
    return vanishes ? none : p * scale;
}
