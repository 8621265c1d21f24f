// A decoder's training pass over the packed rows of a tree, in float32 on a CPU, in one thread: log-probs of target
// tokens, then the gradients of an adapter's matrices. What `mint.engine.layers` and `mint.engine.logprobs` do in torch.
//
// Between norm and attention, and between attention and the end of a layer, rows are taken by the block, so that what
// is computed of them stays in the nearer caches. Every sum has one order, given by the micro-batch alone. The
// structures are those of `structures.py`, field by field.

#include "training_head.h"
#include "training_layers.h"

namespace {

class TrainingPass {
public:
    TrainingPass(const Model& model, const MicroBatch& batch)
        : decoder_(*model.decoder), batch_(batch), space_(model, batch), projections_(model, batch, space_),
          layers_(model, batch, space_, projections_), head_(model, batch, space_, projections_) {}

    void forward(float* logprobs) {
        const int64_t width = decoder_.hidden, layers = decoder_.num_layers;
        for (int64_t row = 0; row < batch_.rows; row++)
            std::memcpy(
                space_.layers[0].x + row * width, decoder_.embedding + batch_.tokens[row] * width, width * sizeof(float)
            );
        for (int64_t n = 0; n < layers; n++)
            layers_.forward(n, n + 1 < layers ? space_.layers[n + 1].x : space_.last);
        for (int64_t row = 0; row < batch_.rows; row++)
            norm(space_.last + row * width, decoder_.final_norm, width, decoder_.eps, space_.hidden + row * width);
        by_row_blocks(0, batch_.live, [&](int64_t first, int64_t rows) { head_.forward(first, rows, true, logprobs); });
        by_row_blocks(batch_.live, batch_.rows, [&](int64_t first, int64_t rows) {
            head_.forward(first, rows, false, logprobs);
        });
    }

    void backward(const float* grad_cells) {
        const int64_t lowest = lowest_trained();
        std::memset(space_.grad, 0, batch_.rows * decoder_.hidden * sizeof(float));
        by_row_blocks(0, batch_.live, [&](int64_t first, int64_t rows) { head_.backward(first, rows, grad_cells); });
        for (int64_t n = decoder_.num_layers - 1; n >= lowest; n--) {
            // Its output is written where nobody looks any more.
            if (batch_.lean) layers_.forward(n, space_.hidden);
            layers_.backward(n, n > lowest);
        }
    }

private:
    // The first layer with an adapter, below which no gradient is needed.
    int64_t lowest_trained() const {
        int64_t number = 0;
        while (number < PROJECTIONS * decoder_.num_layers && !projections_.low_rank(number)) number++;
        return number / PROJECTIONS;
    }

    const Decoder& decoder_;
    const MicroBatch& batch_;
    Space space_;
    Projections projections_;
    Layers layers_;
    Head head_;
};

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// The weights by their inputs, for products with the gradients of their outputs.
void mint_pack_back(const float* weight_OI, int64_t outputs, int64_t inputs, float* packed) {
    pack(weight_OI, inputs, outputs, 1, inputs, packed);
}

// An adapter's B of each of its linears, whose outputs `parts` names, and its A, for the way back.
void mint_pack_low_rank_back(
    const float* down_RI, const float* up_RO, int64_t rank, int64_t inputs, int64_t outputs, const int64_t* parts,
    int64_t num_parts, float* back_up, float* back_down
) {
    const int64_t each = rank / num_parts;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t first = parts[2 * part], columns = parts[2 * part + 1];
        pack(up_RO + part * each * outputs + first, each, columns, outputs, 1, back_up);
        back_up += padded_outputs(each) * columns;
    }
    pack(down_RI, inputs, rank, 1, inputs, back_down);
}

// How many floats of memory a pass wants.
int64_t mint_training_memory(const Model* model, const MicroBatch* batch) { return Space(*model, *batch).used; }

void mint_training_forward(const Model* model, const MicroBatch* batch, float* logprobs) {
    TrainingPass(*model, *batch).forward(logprobs);
}

// After `mint_training_forward` with the same memory.
void mint_training_backward(const Model* model, const MicroBatch* batch, const float* grad_cells) {
    TrainingPass(*model, *batch).backward(grad_cells);
}

}  // extern "C"

#pragma GCC visibility pop
