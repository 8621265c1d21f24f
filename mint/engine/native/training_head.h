// The end of a training pass: log-probs of target tokens from hidden states, a block of rows at a time, and back.
#pragma once

#include <cstring>
#include <numeric>

#include "rows.h"
#include "training_projection.h"

class Head {
public:
    Head(const Model& model, const MicroBatch& batch, Space& space, Projections& projections, Crew& crew)
        : model_(model), decoder_(*model.decoder), batch_(batch), space_(space), projections_(projections), crew_(crew),
          number_(PROJECTIONS * decoder_.num_layers) {}

    // The log-probs of all cells, and for live rows the mean row of the unembedding.
    void forward(float* logprobs) {
        const auto forward = [&](int64_t start, int64_t stop) {
            crew_.by_blocks(start, stop, [&](const RowBlock& block, Bench& bench) {
                forward_block(block.first, block.rows, start < batch_.live, logprobs, bench);
            });
        };
        forward(0, batch_.live);
        forward(batch_.live, batch_.rows);
    }

    // From the gradients of log-probs to those of the last layer's output, and of the unembedding's adapter. Rows without
    // a gradient, such as prompts that were given no weights but an advantage of 0, are left out.
    void backward(const float* grad_cells) {
        std::vector<int64_t> places;  // in the cells' order
        for (int64_t cell = 0; cell < batch_.num_cells && batch_.places[cell] < batch_.live; cell++)
            if (grad_cells[cell] != 0.0f && (places.empty() || places.back() != batch_.places[cell]))
                places.push_back(batch_.places[cell]);
        projections_.restart(number_);
        crew_.by_blocks(0, int64_t(places.size()), [&](const RowBlock& block, Bench& bench) {
            backward_block(places.data() + block.first, block, grad_cells, bench);
        });
    }

private:
    // Of the rows first..first+rows-1 of the cells' order.
    void forward_block(int64_t first, int64_t rows, bool live, float* logprobs, Bench& bench) {
        const int64_t vocabulary = decoder_.unembedding.outputs, width = decoder_.hidden;
        std::vector<double> sums(rows);
        std::vector<int64_t> places(rows);
        std::iota(places.begin(), places.end(), first);
        const bool kept = live && space_.powers;
        float* start = kept ? space_.powers + first * vocabulary : bench.logits;
        logits(gathered(places.data(), rows, bench), rows, start, bench);
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
        product_back(model_.back[number_], {start, vocabulary}, rows, means, bench.pairs);
        for (int64_t n = 0; n < rows; n++) {
            const Vector share = splat(float(1.0 / sums[n]));
            float* mean = means + n * width;
            by_vectors(width, [&](int64_t i, int64_t count) { store(mean + i, load(mean + i, count) * share, count); });
        }
    }

    void backward_block(const int64_t* places, const RowBlock& block, const float* grad_cells, Bench& bench) {
        const int64_t width = decoder_.hidden, rows = block.rows;
        float* grad = bench.normed;
        if (projections_.low_rank(number_))
            adapted_back(places, block, grad_cells, grad, bench);
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
    Rows gathered(const int64_t* places, int64_t rows, Bench& bench) {
        const int64_t width = decoder_.hidden;
        for (int64_t n = 0; n < rows; n++)
            std::memcpy(
                bench.narrow + n * width, space_.hidden + batch_.order[places[n]] * width, width * sizeof(float)
            );
        return {bench.narrow, width};
    }

    void logits(Rows x, int64_t rows, float* out, Bench& bench) {
        projections_.project(decoder_.unembedding, number_, x, rows, bench.low, out, false, bench);
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

    void adapted_back(
        const int64_t* places, const RowBlock& block, const float* grad_cells, float* grad, Bench& bench
    ) {
        const int64_t vocabulary = decoder_.unembedding.outputs, rank = projections_.rank(number_), rows = block.rows;
        const Rows x = gathered(places, rows, bench);
        if (space_.powers)
            reduce(projections_.low_rank(number_)->forward, x, rows, decoder_.hidden, bench.low, rank);
        else
            logits(x, rows, bench.logits, bench);
        const std::vector<float> low(bench.low, bench.low + rows * rank);
        for (int64_t n = 0; n < rows; n++) {
            float *row = bench.logits + n * vocabulary, taken = 0.0f, largest;
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
        projections_.project_back(number_, x, block, low.data(), bench.logits, grad, bench);
    }

    const Model& model_;
    const Decoder& decoder_;
    const MicroBatch& batch_;
    Space& space_;
    Projections& projections_;
    Crew& crew_;
    const int64_t number_;  // of the unembedding among the projections
};
