// The end of a training pass: log-probs of target tokens from hidden states, a block of rows at a time, and back.
#pragma once

#include <cstring>
#include <numeric>

#include "rows.h"
#include "training_projection.h"

class Head {
public:
    Head(const Model& model, const MicroBatch& batch, Space& space, Projections& projections)
        : model_(model), decoder_(*model.decoder), batch_(batch), space_(space), projections_(projections),
          number_(PROJECTIONS * decoder_.num_layers) {}

    // The log-probs of the cells whose rows are first..first+rows-1 of the cells' order. For `live` rows it takes the
    // mean row of the unembedding as well.
    void forward(int64_t first, int64_t rows, bool live, float* logprobs) {
        const int64_t vocabulary = decoder_.unembedding.outputs, width = decoder_.hidden;
        std::vector<double> sums(rows);
        std::vector<int64_t> places(rows);
        std::iota(places.begin(), places.end(), first);
        const bool kept = live && space_.powers;
        float* start = kept ? space_.powers + first * vocabulary : space_.logits;
        logits(gathered(places.data(), rows), rows, start);
        for (int64_t n = 0; n < rows; n++) {
            float *row = start + n * vocabulary, largest;
            by_cells(first + n, [&](int64_t cell) { logprobs[cell] = row[batch_.targets[cell]]; });
            sums[n] = powers(row, &largest);
            if (kept) space_.sums[first + n] = sums[n];
            by_cells(first + n, [&](int64_t cell) {
                logprobs[cell] = float(double((logprobs[cell] - largest) / batch_.temperature) - std::log(sums[n]));
            });
        }
        // With an adapter of its own the unembedding needs its logits on the way back.
        if (!live || !batch_.keep || projections_.low_rank(number_)) return;
        float* means = space_.means + first * width;
        product_back(model_.back[number_], {start, vocabulary}, rows, means, space_.pairs);
        for (int64_t n = 0; n < rows; n++) {
            const Vector share = splat(float(1.0 / sums[n]));
            float* mean = means + n * width;
            by_vectors(width, [&](int64_t i, int64_t count) { store(mean + i, load(mean + i, count) * share, count); });
        }
    }

    // From the gradients of log-probs to those of the last layer's output, and of the unembedding's adapter. Rows without
    // a gradient, such as prompts that were given no weights but an advantage of 0, are left out.
    void backward(const float* grad_cells) {
        std::vector<int64_t> places;  // in the cells' order
        for (int64_t cell = 0; cell < batch_.num_cells && batch_.places[cell] < batch_.live; cell++)
            if (grad_cells[cell] != 0.0f && (places.empty() || places.back() != batch_.places[cell]))
                places.push_back(batch_.places[cell]);
        by_row_blocks(0, int64_t(places.size()), [&](int64_t first, int64_t rows) {
            block_back(places.data() + first, rows, grad_cells);
        });
    }

private:
    void block_back(const int64_t* places, int64_t rows, const float* grad_cells) {
        const int64_t width = decoder_.hidden;
        float* grad = space_.normed;
        if (projections_.low_rank(number_))
            adapted_back(places, rows, grad_cells, grad);
        else
            for (int64_t n = 0; n < rows; n++) plain_back(places[n], grad_cells, grad + n * width);
        for (int64_t n = 0; n < rows; n++) {
            const int64_t row = batch_.order[places[n]] * width;
            norm_back(
                space_.last + row, decoder_.final_norm, width, decoder_.eps, grad + n * width, space_.grad + row, false
            );
        }
    }

    // Hidden states at those places of the cells' order, now in `narrow`.
    Rows gathered(const int64_t* places, int64_t rows) {
        const int64_t width = decoder_.hidden;
        for (int64_t n = 0; n < rows; n++)
            std::memcpy(
                space_.narrow + n * width, space_.hidden + batch_.order[places[n]] * width, width * sizeof(float)
            );
        return {space_.narrow, width};
    }

    void logits(Rows x, int64_t rows, float* out) {
        projections_.project(decoder_.unembedding, number_, x, rows, space_.low, out, false);
    }

    // A row's logits become e^((logit - largest) / temperature); gives their sum, and the largest.
    double powers(float* logits, float* largest) const {
        const int64_t vocabulary = decoder_.unembedding.outputs;
        const Vector hidden = splat(-INF), rate = splat(1.0f / batch_.temperature);
        Vector most = hidden;
        by_vectors(vocabulary, [&](int64_t i, int64_t n) {
            for_lanes(logits + i, n, [&](Vector x) { most = x > most ? x : most; });
        });
        *largest = largest_of(most);
        const Vector peak = splat(*largest);
        double total = 0.0;
        constexpr int64_t RUN = 16 * LANES;  // tokens whose probabilities are summed at once, as where they are drawn
        for (int64_t start = 0; start < vocabulary; start += RUN) {
            Vector sum = {};
            by_vectors(std::min(RUN, vocabulary - start), [&](int64_t i, int64_t n) {
                float* place = logits + start + i;
                for_lanes(place, n, [&](Vector x) {
                    const Vector power = exponential((x - peak) * rate);
                    sum += power;
                    store(place, power, n);
                });
            });
            total += sum_of(sum);
        }
        return total;
    }

    // The first `count` lanes; the others hold -inf.
    template <typename Work>
    static void for_lanes(const float* from, int64_t count, const Work& work) {
        if (count >= LANES) return work(load(from));
        Vector x = splat(-INF);
        std::memcpy(&x, from, count * sizeof(float));
        work(x);
    }

    // The cells of a row of the order: they stand in the rows' order.
    template <typename Work>
    void by_cells(int64_t row, const Work& work) const {
        const int64_t* stop = batch_.places + batch_.num_cells;
        for (const int64_t* place = std::lower_bound(batch_.places, stop, row); place < stop && *place == row; place++)
            work(place - batch_.places);
    }

    // A log-prob's gradient in its hidden state is the target's row of the unembedding less the mean row.
    void plain_back(int64_t place, const float* grad_cells, float* grad) const {
        const int64_t width = decoder_.hidden;
        std::memset(grad, 0, width * sizeof(float));
        float taken = 0.0f;
        const auto add = [&](const float* row, float factor) {
            const Vector times = splat(factor);
            by_vectors(width, [&](int64_t i, int64_t n) {
                store(grad + i, load(grad + i, n) + load(row + i, n) * times, n);
            });
        };
        by_cells(place, [&](int64_t cell) {
            const float given = grad_cells[cell] / batch_.temperature;
            taken += given;
            add(model_.unembedding_VH + batch_.targets[cell] * width, given);
        });
        add(space_.means + place * width, -taken);
    }

    void adapted_back(const int64_t* places, int64_t rows, const float* grad_cells, float* grad) {
        const int64_t vocabulary = decoder_.unembedding.outputs, rank = projections_.rank(number_);
        const Rows x = gathered(places, rows);
        if (space_.powers)
            reduce(projections_.low_rank(number_)->forward, x, rows, decoder_.hidden, space_.low, rank);
        else
            logits(x, rows, space_.logits);
        const std::vector<float> low(space_.low, space_.low + rows * rank);
        for (int64_t n = 0; n < rows; n++) {
            float *row = space_.logits + n * vocabulary, taken = 0.0f, largest;
            const double sum = space_.powers ? space_.sums[places[n]] : powers(row, &largest);
            const float* from = space_.powers ? space_.powers + places[n] * vocabulary : row;
            by_cells(places[n], [&](int64_t cell) { taken += grad_cells[cell] / batch_.temperature; });
            const Vector share = splat(float(-taken / sum));
            by_vectors(vocabulary, [&](int64_t i, int64_t count) {
                store(row + i, load(from + i, count) * share, count);
            });
            by_cells(places[n], [&](int64_t cell) {
                row[batch_.targets[cell]] += grad_cells[cell] / batch_.temperature;
            });
        }
        projections_.project_back(number_, x, rows, low.data(), space_.logits, grad);
    }

    const Model& model_;
    const Decoder& decoder_;
    const MicroBatch& batch_;
    Space& space_;
    Projections& projections_;
    const int64_t number_;  // of the unembedding among the projections
};
