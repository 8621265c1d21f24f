// A decoder's training pass over the packed rows of a tree, in float32 on a CPU: log-probs of target tokens, then the
// gradients of an adapter's matrices. What `mint.engine.layers` and `mint.engine.logprobs` do in torch.
//
// Between norm and attention, and between attention and the end of a layer, rows are taken by the block, so that what
// is computed of them stays in the nearer caches; attention by node and head. Several threads share these. Every sum has
// one order, given by the micro-batch alone. The structures are those of `structures.py`, field by field.

#include "training_head.h"
#include "training_layers.h"

namespace {

class TrainingPass {
public:
    TrainingPass(const Model& model, const MicroBatch& batch)
        : decoder_(*model.decoder), batch_(batch), memory_(batch.memory),
          adapter_(decoder_, batch.adapter, batch.keep, memory_), space_(model, batch, adapter_, memory_),
          crew_(batch.threads, space_), projections_(model, adapter_), layers_(model, batch, space_, projections_, crew_),
          head_(model, batch, space_, projections_, crew_) {}

    // Floats of memory, all in all.
    int64_t used() const { return memory_.used(); }

    void forward(float* logprobs) {
        crew_.by_pieces(adapter_.parts(), [&](int64_t part, Bench&) { adapter_.pack(part); });
        const int64_t width = decoder_.hidden, layers = decoder_.num_layers;
        by_rows([&](int64_t row) {
            const float* from = decoder_.embedding + batch_.tokens[row] * width;
            embed(from, width, decoder_.embedding_scale, space_.layers[0].x + row * width);
        });
        for (int64_t n = 0; n < layers; n++)
            layers_.forward(n, n + 1 < layers ? space_.layers[n + 1].x : space_.last);
        by_rows([&](int64_t row) {
            norm(space_.last + row * width, decoder_.final_norm, width, decoder_.eps, space_.hidden + row * width);
        });
        head_.forward(logprobs);
    }

    void backward(const float* grad_cells, float* gradients) {
        const int64_t lowest = lowest_trained();
        crew_.by_pieces(adapter_.parts(), [&](int64_t part, Bench&) { adapter_.clear_gradients(part); });
        std::memset(space_.grad, 0, batch_.rows * decoder_.hidden * sizeof(float));
        head_.backward(grad_cells);
        for (int64_t n = decoder_.num_layers - 1; n >= lowest; n--) {
            // Its output is written where nobody looks any more.
            if (batch_.lean) layers_.forward(n, space_.hidden);
            layers_.backward(n, n > lowest);
        }
        crew_.by_pieces(adapter_.linears(), [&](int64_t linear, Bench&) { adapter_.gradients(linear, gradients); });
    }

private:
    template <typename Work>
    void by_rows(const Work& work) {
        crew_.by_blocks(0, batch_.rows, [&](const RowBlock& block, Bench&) {
            for (int64_t row = block.first; row < block.first + block.rows; row++) work(row);
        });
    }

    // The first layer with an adapter, below which no gradient is needed.
    int64_t lowest_trained() const {
        int64_t number = 0;
        while (number < PROJECTIONS * decoder_.num_layers && !projections_.low_rank(number)) number++;
        return number / PROJECTIONS;
    }

    const Decoder& decoder_;
    const MicroBatch& batch_;
    Memory memory_;
    TrainedAdapter adapter_;
    Space space_;
    Crew crew_;
    Projections projections_;
    Layers layers_;
    Head head_;
};

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// A weight in panels of its inputs.
void mint_pack_back(const float* weight_OI, int64_t outputs, int64_t inputs, float* packed) {
    pack(weight_OI, inputs, outputs, 1, inputs, packed);
}

void mint_pack_pairs_back(const uint16_t* weight_OI, int64_t outputs, int64_t inputs, uint32_t* packed) {
    pack_pairs(weight_OI, inputs, outputs, 1, inputs, packed);
}

// How many floats of memory a pass wants.
int64_t mint_training_memory(const Model* model, const MicroBatch* batch) { return TrainingPass(*model, *batch).used(); }

void mint_training_forward(const Model* model, const MicroBatch* batch, float* logprobs) {
    TrainingPass(*model, *batch).forward(logprobs);
}

// After `mint_training_forward` with the same memory; see `TrainedAdapter::gradients` for what comes out.
void mint_training_backward(const Model* model, const MicroBatch* batch, const float* grad_cells, float* gradients) {
    TrainingPass(*model, *batch).backward(grad_cells, gradients);
}

}  // extern "C"

#pragma GCC visibility pop
