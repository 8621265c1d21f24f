// An adapter in training: its matrices packed for both ways, and its gradients.
#pragma once

#include "adapter.h"

// Its part of one projection. Beside what sampling needs: for the way back each linear's B, one after the other, and all
// A; and the gradients, [rank, inputs] of all A and [rank, outputs] of each linear's B, which are added to.
struct TrainedLowRank {
    Adapted adapted;
    LowRank forward;
    float *back_up, *back_down, *grad_down, *grad_up;

    int64_t outputs() const {  // of the linears, which may not be all of the projection's
        int64_t sum = 0;
        for (const AdaptedLinear* linear : adapted.linears) sum += linear->outputs;
        return sum;
    }
};

class TrainedAdapter {
public:
    TrainedAdapter(const Decoder& decoder, const Adapter* adapter, bool back, Memory& memory) : adapter_(adapter) {
        for (int64_t number = 0; adapter && number < decoder.projections(); number++) {
            TrainedLowRank part{Adapted(decoder, adapter, number), {}, nullptr, nullptr, nullptr, nullptr};
            const int64_t rank = part.adapted.rank(), inputs = part.adapted.inputs;
            part.forward = take_low_rank(part.adapted, memory);
            if (back && rank) {
                part.back_up = memory.take(padded_outputs(adapter->rank) * part.outputs());
                part.back_down = memory.take(padded_outputs(inputs) * rank);
                part.grad_down = memory.take(rank * inputs);
                part.grad_up = memory.take(adapter->rank * part.outputs());
            }
            parts_.push_back(std::move(part));
        }
    }

    // The part of a projection, if there is one.
    const TrainedLowRank* part(int64_t number) const {
        return adapter_ && parts_[number].forward.rank ? &parts_[number] : nullptr;
    }

    int64_t rank(int64_t number) const { return adapter_ ? parts_[number].forward.rank : 0; }

    int64_t most_rank() const {
        int64_t most = 0;
        for (const TrainedLowRank& part : parts_) most = std::max(most, part.forward.rank);
        return most;
    }

    int64_t parts() const { return int64_t(parts_.size()); }

    void pack(int64_t number) {
        TrainedLowRank& part = parts_[number];
        const Adapted& adapted = part.adapted;
        if (!part.forward.rank) return;
        pack_down(adapted, part.forward.down);
        pack_up(adapted, adapter_->scale, part.forward.up, part.forward.ranges);
        if (!part.back_up) return;
        pack_back_down(adapted, part.back_down);
        float* back_up = part.back_up;
        for (const AdaptedLinear* linear : adapted.linears) {
            pack_back_up(*linear, adapted.each, adapter_->scale, back_up);
            back_up += padded_outputs(adapted.each) * linear->outputs;
        }
    }

    void clear_gradients(int64_t number) {
        const TrainedLowRank& part = parts_[number];
        if (!part.forward.rank) return;
        std::memset(part.grad_down, 0, part.forward.rank * part.adapted.inputs * sizeof(float));
        std::memset(part.grad_up, 0, adapter_->rank * part.outputs() * sizeof(float));
    }

    int64_t linears() const { return adapter_->count; }

    // Of a linear's A and B. Those of all linears stand one after the other, in the shapes and the order in which they
    // were given.
    void gradients(int64_t number, float* out) const {
        const int64_t rank = adapter_->rank;
        for (int64_t n = 0; n < number; n++) {
            const AdaptedLinear& before = adapter_->linears[n];
            out += rank * (parts_[before.projection].adapted.inputs + before.outputs);
        }
        const AdaptedLinear& linear = adapter_->linears[number];
        const TrainedLowRank& part = parts_[linear.projection];
        const int64_t inputs = part.adapted.inputs, outputs = linear.outputs;
        const float *grad_down = part.grad_down, *grad_up = part.grad_up;
        for (const AdaptedLinear* before : part.adapted.linears) {
            if (before == &linear) break;
            grad_down += rank * inputs, grad_up += rank * before->outputs;
        }
        std::memcpy(out, grad_down, rank * inputs * sizeof(float));
        out += rank * inputs;
        for (int64_t o = 0; o < outputs; o++)
            for (int64_t r = 0; r < rank; r++) *out++ = grad_up[r * outputs + o] * adapter_->scale;
    }

private:
    const Adapter* adapter_;
    std::vector<TrainedLowRank> parts_;
};
