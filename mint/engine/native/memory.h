// A piece of memory that is handed out part by part.
#pragma once

#include <cstdint>

#include "vectors.h"

// Always in the same order; without any it only counts.
class Memory {
public:
    explicit Memory(float* start) : start_(start) {}

    // With room for a vector beyond the last number.
    float* take(int64_t count) {
        float* piece = start_ ? start_ + used_ : nullptr;
        used_ += (count + 2 * LANES - 1) / LANES * LANES;
        return piece;
    }
    int64_t used() const { return used_; }

private:
    float* start_;
    int64_t used_ = 0;
};
