// The two matrix products of attention in float32, for any entries and any processor.

#pragma once

#include <algorithm>

#include "block.h"
#include "direct.h"
#include "prefetch.h"
#include "vectors.h"

template <typename T> class WidenedProducts {
  public:
    using Entry = T;
    using Weight = float;
    using Row = Vec;
    static constexpr int STEP = LANES;  // entries in a vector

    WidenedProducts(int dim, int rows)
        : dim_(dim), queries_(size_t(rows) * dim), keys_t_(size_t(dim) * GROUPS * LANES) {}

    // Sets rows base .. base + count of the queries.
    void set_queries(int base, const T* q, int64_t stride, int count, float scale) {
        for (int r = 0; r < count; ++r)
            // By one factor after the other: their rounded product would be the same error in all scores.
            for (int d = 0; d < dim_; ++d) queries_[(base + r) * dim_ + d] = widen(q[r * stride + d]) * scale * LOG2E;
    }

    // Computes scores [count][BLOCK] of queries base .. base + count with `block_tokens` keys; `next` are the keys
    // to prefetch.
    void score(int base, const T* keys, const T* next, int64_t stride, int block_tokens, int count, float* scores) {
        for (int group = 0; group < block_tokens; group += GROUPS * LANES) {
            const int calls = count / SCORE_ROWS + count % SCORE_ROWS / 2 + count % 2;
            const int steps = GROUPS * dim_ / LANES * TRANSPOSITION_STEPS + calls * dim_;
            Prefetcher prefetcher(next + group * stride, GROUPS * LANES, dim_, stride, steps);
            for (int g = 0; g < GROUPS; ++g) {
                int lanes = std::clamp(block_tokens - group - g * LANES, 0, LANES);
                const T* first = keys + (group + g * LANES) * stride;
                for (int d = 0; d < dim_; d += LANES) {
                    Vec rows[LANES];
                    for (int i = 0; i < LANES; ++i) rows[i] = i < lanes ? load(first + i * stride + d) : Vec{};
                    for (int i = 0; i < TRANSPOSITION_STEPS; ++i) prefetcher.step();
                    transpose(rows);
                    for (int i = 0; i < LANES; ++i) store(&keys_t_[((d + i) * GROUPS + g) * LANES], rows[i]);
                }
            }
            int r = 0;
            for (; r + SCORE_ROWS <= count; r += SCORE_ROWS) score_rows<SCORE_ROWS>(base, r, scores + group, prefetcher);
            for (; r + 2 <= count; r += 2) score_rows<2>(base, r, scores + group, prefetcher);
            if (r < count) score_rows<1>(base, r, scores + group, prefetcher);
        }
    }

    static Row row(const T* p) { return load(p); }
    static Vec add_product(Vec sums, Row x, Row y) { return ::add_product(sums, x, y); }

    // Adds weights [count][BLOCK] of `block_tokens` tokens times values to sums [count][dim].
    void sum(const float* weights, const T* values, const T* next, int64_t stride, int block_tokens, int count,
             float* sums) {
        constexpr int WIDE = SUM_VECS * LANES;
        int passes = dim_ / WIDE + dim_ % WIDE / LANES, calls = count / SUM_ROWS + count % SUM_ROWS;
        Prefetcher prefetcher(next, BLOCK, dim_, stride, passes * calls * BLOCK);
        int d = 0;
        for (; d + WIDE <= dim_; d += WIDE)
            sum_columns<SUM_VECS>(weights, values + d, stride, block_tokens, count, sums + d, prefetcher);
        for (; d < dim_; d += LANES) sum_columns<1>(weights, values + d, stride, block_tokens, count, sums + d, prefetcher);
    }

    // Multiplies rows of sums [count][dim] by factors.
    void finish(float* sums, const float* factors, int count) const {
        for (int r = 0; r < count; ++r)
            for (int d = 0; d < dim_; ++d) sums[r * dim_ + d] *= factors[r];
    }

  private:
    static constexpr int SCORE_ROWS = 8;  // times GROUPS accumulators in registers while scoring
    static constexpr int GROUPS = 2;      // of LANES keys each, transposed and scored together
    static constexpr int SUM_ROWS = 4;    // times SUM_VECS accumulators in registers while summing values
    static constexpr int SUM_VECS = 4;
    static constexpr int TRANSPOSITION_STEPS = 8;  // of the prefetcher

    // Scores R queries against the keys in keys_t_ [dim][GROUPS][LANES].
    template <int R> void score_rows(int base, int first, float* scores, Prefetcher& prefetcher) const {
        const float* q = &queries_[(base + first) * dim_];
        Vec acc[R][GROUPS] = {};
        Prefetcher next = prefetcher;  // in registers
        for (int d = 0; d < dim_; ++d) {
            next.step();
            Vec k[GROUPS];
            for (int g = 0; g < GROUPS; ++g) k[g] = load(&keys_t_[(d * GROUPS + g) * LANES]);
            for (int r = 0; r < R; ++r) {
                Vec weight = splat(q[r * dim_ + d]);
                for (int g = 0; g < GROUPS; ++g) acc[r][g] = add_product(acc[r][g], weight, k[g]);
            }
        }
        prefetcher = next;
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < GROUPS; ++g) store(scores + (first + r) * BLOCK + g * LANES, acc[r][g]);
    }

    template <int W>
    void sum_columns(const float* weights, const T* values, int64_t stride, int block_tokens, int count, float* sums,
                     Prefetcher& prefetcher) const {
        int r = 0;
        for (; r + SUM_ROWS <= count; r += SUM_ROWS)
            sum_rows<SUM_ROWS, W>(weights + r * BLOCK, values, stride, block_tokens, sums + r * dim_, prefetcher);
        for (; r < count; ++r) sum_rows<1, W>(weights + r * BLOCK, values, stride, block_tokens, sums + r * dim_, prefetcher);
    }

    template <int R, int W>
    void sum_rows(const float* weights, const T* values, int64_t stride, int block_tokens, float* sums, Prefetcher& prefetcher) const {
        // A sum per block: one chain over all tokens would lose precision.
        Vec acc[R][W] = {};
        Prefetcher next = prefetcher;
        for (int k = 0; k < block_tokens; ++k) {
            next.step();
            const T* row = values + k * stride;
            Vec v[W];
            for (int w = 0; w < W; ++w) v[w] = load(row + w * LANES);
            for (int r = 0; r < R; ++r) {
                const Vec weight = splat(weights[r * BLOCK + k]);
                for (int w = 0; w < W; ++w) acc[r][w] = add_product(acc[r][w], weight, v[w]);
            }
        }
        prefetcher = next;
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w) {
                float* sum = sums + r * dim_ + w * LANES;
                store(sum, load(sum) + acc[r][w]);
            }
    }

    int dim_;
    Buffer<float> queries_, keys_t_;
};
