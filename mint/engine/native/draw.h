// One token of a row of logits, from the whole distribution at a temperature (0: the likeliest), and its log-prob
// without temperature: what `mint.engine.sampler.logits` does for rows that ask for nothing else.
#pragma once

#include <vector>

#include "vectors.h"

struct Draw {
    int64_t token;
    float logprob;
};

constexpr int64_t RUN = 16 * LANES;  // tokens whose probabilities are summed at once

// Calls take(start, vector) for each vector of the numbers from..to-1; lanes behind the last hold -inf.
template <typename Take>
inline void each_vector(const float* numbers, int64_t from, int64_t to, const Take& take) {
    for (; from + LANES <= to; from += LANES) take(from, load(numbers + from));
    if (from < to) {
        Vector rest = splat(-INF);
        for (int64_t i = from; i < to; i++) rest[i - from] = numbers[i];
        take(from, rest);
    }
}

// e^((x - peak) * rate), added up over all tokens; the sums of runs are kept if asked for.
inline double mass_of(const float* logits, int64_t vocabulary, float peak, float rate, std::vector<double>* runs) {
    double total = 0.0;
    for (int64_t start = 0; start < vocabulary; start += RUN) {
        Vector sum = {};
        each_vector(logits, start, std::min(vocabulary, start + RUN), [&](int64_t, Vector x) {
            sum += exponential((x - splat(peak)) * splat(rate));
        });
        const double mass = sum_of(sum);
        total += mass;
        if (runs) runs->push_back(mass);
    }
    return total;
}

// The first token at which the probabilities added up exceed the target; never one of probability 0.
inline int64_t token_at(
    const float* logits, int64_t vocabulary, float peak, float rate, const std::vector<double>& runs, double target
) {
    double before = 0.0;
    size_t run = 0;
    int64_t last = 0;
    while (run + 1 < runs.size() && before + runs[run] <= target) before += runs[run++];
    // Rounding may leave the target beyond the run it is in: then the run's last token that can be drawn.
    for (bool found = false; !found; run--) {
        const int64_t start = int64_t(run) * RUN;
        each_vector(logits, start, std::min(vocabulary, start + RUN), [&](int64_t at, Vector x) {
            const Vector probability = exponential((x - splat(peak)) * splat(rate));
            for (int lane = 0; lane < LANES; lane++) {
                if (probability[lane] > 0.0f && before <= target) last = at + lane, found = true;
                before += probability[lane];
            }
        });
        if (run == 0) break;
    }
    return last;
}

inline Draw draw(const float* logits, int64_t vocabulary, float temperature, double uniform) {
    float peak = -INF;
    bool sound = true;
    each_vector(logits, 0, vocabulary, [&](int64_t, Vector x) { peak = std::max(peak, largest_of(x)); });
    for (int64_t i = 0; i < vocabulary; i++) sound &= logits[i] * 0.0f == 0.0f;
    if (!sound) return {0, std::numeric_limits<float>::quiet_NaN()};
    static thread_local std::vector<double> runs;
    runs.clear();
    const float rate = 1.0f / std::max(temperature, std::numeric_limits<float>::min());
    int64_t token = 0;
    double total;
    if (temperature == 0.0f) {
        while (logits[token] != peak) token++;
        total = mass_of(logits, vocabulary, peak, 1.0f, nullptr);
    } else {
        const double mass = mass_of(logits, vocabulary, peak, rate, &runs);
        token = token_at(logits, vocabulary, peak, rate, runs, uniform * mass);
        total = rate == 1.0f ? mass : mass_of(logits, vocabulary, peak, 1.0f, nullptr);
    }
    return {token, float(double(logits[token] - peak) - std::log(total))};
}
