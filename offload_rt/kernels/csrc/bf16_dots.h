// The two matrix products of attention with AVX-512's dot products of bfloat16 pairs, summed in float32.
//
// For scores a lane is a key and a pair is two dimensions, so a block of keys is transposed in units of 32 bits.
// For sums a lane is a dimension and a pair is two tokens, so two rows of values are interleaved. Weights are
// rounded to bfloat16, as in torch's kernel.

#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define OFFLOAD_RT_BF16_DOTS 1

#include <immintrin.h>

#include <algorithm>

#include "block.h"
#include "direct.h"
#include "prefetch.h"
#include "vectors.h"


class Bf16DotProducts {
  public:
    using Entry = BFloat16;
    using Weight = BFloat16;
    using Row = __m512bh;
    static constexpr int STEP = 2 * LANES;  // entries in a vector; head_dim must be a multiple

    Bf16DotProducts(int dim, int rows)
        : dim_(dim), scale_(0), queries_(size_t(rows) * dim / 2), keys_t_(size_t(dim) / 2 * GROUPS * LANES),
          pairs_(BLOCK / 2 * SUM_VECS * LANES) {}

    // Sets rows base .. base + count of the queries.
    void set_queries(int base, const BFloat16* q, int64_t stride, int count, float scale) {
        for (int r = 0; r < count; ++r) std::memcpy(&queries_[(base + r) * dim_ / 2], q + r * stride, dim_ * sizeof *q);
        scale_ = scale * LOG2E;
    }

    // Computes scores [count][BLOCK] of queries base .. base + count with `block_tokens` keys; `next` are the keys
    // to prefetch.
    void score(int base, const BFloat16* keys, const BFloat16* next, int64_t stride, int block_tokens, int count,
               float* scores) {
        for (int group = 0; group < block_tokens; group += GROUPS * LANES) {
            const int steps = GROUPS * dim_ / STEP * TRANSPOSITION_STEPS + row_calls(count) * dim_ / 2;
            Prefetcher prefetcher(next + group * stride, GROUPS * LANES, dim_, stride, steps);
            for (int g = 0; g < GROUPS; ++g) {
                int lanes = std::clamp(block_tokens - group - g * LANES, 0, LANES);
                transpose_keys(keys + (group + g * LANES) * stride, stride, lanes, g, prefetcher);
            }
            int r = 0;
            for (; r + 4 <= count; r += 4) score_rows<4>(base, r, scores + group, prefetcher);
            for (; r + 2 <= count; r += 2) score_rows<2>(base, r, scores + group, prefetcher);
            if (r < count) score_rows<1>(base, r, scores + group, prefetcher);
        }
    }

    static Row row(const BFloat16* p) { return reinterpret<Row>(_mm512_loadu_si512(p)); }
    static Vec add_product(Vec sums, Row x, Row y) {
        return reinterpret<Vec>(_mm512_dpbf16_ps(reinterpret<__m512>(sums), x, y));
    }

    // Adds weights [count][BLOCK] of `block_tokens` tokens times values to sums [count][dim], in the order that
    // `finish` mends.
    void sum(const BFloat16* weights, const BFloat16* values, const BFloat16* next, int64_t stride, int block_tokens, int count,
             float* sums) {
        constexpr int WIDE = SUM_VECS * LANES;
        int passes = dim_ / WIDE + dim_ % WIDE / STEP;
        Prefetcher prefetcher(next, BLOCK, dim_, stride, passes * row_calls(count) * BLOCK / 2);
        int d = 0;
        for (; d + WIDE <= dim_; d += WIDE)
            sum_columns<SUM_VECS>(weights, values + d, stride, block_tokens, count, sums + d, prefetcher);
        for (; d < dim_; d += STEP) sum_columns<2>(weights, values + d, stride, block_tokens, count, sums + d, prefetcher);
    }

    // Multiplies rows of sums [count][dim] by factors, and puts them in the order of the dimensions, which interleaving
    // changes within 128 bits.
    OWN_REGISTERS void finish(float* sums, const float* factors, int count) const {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for (int r = 0; r < count; ++r, sums += dim_) {
            const __m512 factor = _mm512_set1_ps(factors[r]);
            for (int d = 0; d < dim_; d += STEP) {
                const __m512 low = _mm512_load_ps(sums + d) * factor, high = _mm512_load_ps(sums + d + LANES) * factor;
                _mm512_store_ps(sums + d, _mm512_permutex2var_ps(low, first, high));
                _mm512_store_ps(sums + d + LANES, _mm512_permutex2var_ps(low, second, high));
            }
        }
    }

  private:
    static constexpr int GROUPS = 4;  // of LANES keys each, transposed and scored together
    static constexpr int SUM_VECS = 4;
    static constexpr int TRANSPOSITION_STEPS = 4;  // of the prefetcher; one query waits for memory with 2, four with 8
    static constexpr int FEW = 4;  // queries for which values are interleaved in registers

    // Number of calls of score_rows or sum_rows for `count` queries: four rows each, then two and one.
    static int row_calls(int count) { return count / 4 + count % 4 / 2 + count % 2; }

    static __m512bh both(uint32_t pair) { return reinterpret<__m512bh>(_mm512_set1_epi32(int(pair))); }
    static __m512bh pairs(const float* p) { return reinterpret<__m512bh>(_mm512_load_ps(p)); }

    // Transposes a group of `lanes` keys, padded with zeros, to keys_t_ [dim / 2][GROUPS][LANES], and prefetches
    // meanwhile.
    OWN_REGISTERS void transpose_keys(const BFloat16* keys, int64_t stride, int lanes, int group, Prefetcher& prefetcher) {
        Prefetcher next = prefetcher;
        for (int d = 0; d < dim_; d += STEP) {
            Vec rows[LANES];
            for (int i = 0; i < LANES; ++i)
                rows[i] = i < lanes ? load(reinterpret_cast<const float*>(keys + i * stride + d)) : Vec{};
            for (int i = 0; i < TRANSPOSITION_STEPS; ++i) next.step();
            transpose(rows);
            float* to = &keys_t_[(d / 2 * GROUPS + group) * LANES];
            for (int i = 0; i < LANES; ++i) _mm512_store_ps(to + i * GROUPS * LANES, reinterpret<__m512>(rows[i]));
        }
        prefetcher = next;
    }

    template <int R> OWN_REGISTERS void score_rows(int base, int first, float* scores, Prefetcher& prefetcher) const {
        const uint32_t* q = &queries_[(base + first) * dim_ / 2];
        __m512 acc[R][GROUPS] = {};
        Prefetcher next = prefetcher;  // in registers
        for (int p = 0; p < dim_ / 2; ++p) {
            next.step();
            __m512bh k[GROUPS];
            for (int g = 0; g < GROUPS; ++g) k[g] = pairs(&keys_t_[(p * GROUPS + g) * LANES]);
            for (int r = 0; r < R; ++r) {
                __m512bh pair = both(q[r * dim_ / 2 + p]);
                for (int g = 0; g < GROUPS; ++g) acc[r][g] = _mm512_dpbf16_ps(acc[r][g], pair, k[g]);
            }
        }
        prefetcher = next;
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < GROUPS; ++g)
                _mm512_store_ps(scores + (first + r) * BLOCK + g * LANES,
                                _mm512_mul_ps(acc[r][g], _mm512_set1_ps(scale_)));
    }

    // Interleaves two rows of values, the second zero if null, to pairs_ [BLOCK / 2][W][LANES].
    template <int W> static void interleave(const BFloat16* first, const BFloat16* second, float* to) {
        for (int w = 0; w < W; w += 2) {
            __m512i even = _mm512_loadu_si512(first + w * LANES);
            __m512i odd = second ? _mm512_loadu_si512(second + w * LANES) : _mm512_setzero_si512();
            _mm512_store_si512(to + w * LANES, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(to + (w + 1) * LANES, _mm512_unpackhi_epi16(even, odd));
        }
    }

    template <int W>
    void sum_columns(const BFloat16* weights, const BFloat16* values, int64_t stride, int block_tokens, int count,
                     float* sums, Prefetcher& prefetcher) {
        if (count <= FEW) {
            if (count == 4) return sum_direct<4, W>(weights, values, stride, block_tokens, sums, prefetcher);
            int r = count >= 2 ? 2 : 0;
            if (r) sum_direct<2, W>(weights, values, stride, block_tokens, sums, prefetcher);
            if (r < count) sum_direct<1, W>(weights + r * BLOCK, values, stride, block_tokens, sums + r * dim_, prefetcher);
            return;
        }
        float* to = &pairs_[0];
        const BFloat16* row = values;
        for (int k = 0; k + 2 <= block_tokens; k += 2, row += 2 * stride, to += W * LANES) interleave<W>(row, row + stride, to);
        if (block_tokens % 2) interleave<W>(row, nullptr, to);
        int r = 0;
        for (; r + 4 <= count; r += 4) sum_rows<4, W>(weights + r * BLOCK, block_tokens, sums + r * dim_, prefetcher);
        for (; r + 2 <= count; r += 2) sum_rows<2, W>(weights + r * BLOCK, block_tokens, sums + r * dim_, prefetcher);
        if (r < count) sum_rows<1, W>(weights + r * BLOCK, block_tokens, sums + r * dim_, prefetcher);
    }

    // Does `sum_rows` for few queries, and interleaves in registers.
    template <int R, int W>
    OWN_REGISTERS void sum_direct(const BFloat16* weights, const BFloat16* values, int64_t stride, int block_tokens, float* sums,
                                  Prefetcher& prefetcher) const {
        __m512 acc[R][W] = {};
        Prefetcher next = prefetcher;
        const BFloat16* row = values;
        for (int k = 0; k < block_tokens; k += 2, row += 2 * stride) {
            next.step();
            const bool both_rows = k + 1 < block_tokens;
            __m512bh pair[R];
            for (int r = 0; r < R; ++r) {
                uint32_t bits;
                std::memcpy(&bits, weights + r * BLOCK + k, sizeof bits);
                pair[r] = both(bits);
            }
            for (int w = 0; w < W; w += 2) {
                __m512i even = _mm512_loadu_si512(row + w * LANES);
                __m512i odd = both_rows ? _mm512_loadu_si512(row + stride + w * LANES) : _mm512_setzero_si512();
                const __m512bh low = reinterpret<__m512bh>(_mm512_unpacklo_epi16(even, odd));
                const __m512bh high = reinterpret<__m512bh>(_mm512_unpackhi_epi16(even, odd));
                for (int r = 0; r < R; ++r) {
                    acc[r][w] = _mm512_dpbf16_ps(acc[r][w], pair[r], low);
                    acc[r][w + 1] = _mm512_dpbf16_ps(acc[r][w + 1], pair[r], high);
                }
            }
        }
        prefetcher = next;
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w) {
                float* sum = sums + r * dim_ + w * LANES;
                _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), acc[r][w]));
            }
    }

    template <int R, int W>
    OWN_REGISTERS void sum_rows(const BFloat16* weights, int block_tokens, float* sums, Prefetcher& prefetcher) const {
        // A sum per block: one chain over all tokens would lose precision.
        __m512 acc[R][W] = {};
        Prefetcher next = prefetcher;
        for (int p = 0; p < (block_tokens + 1) / 2; ++p) {
            next.step();
            __m512bh v[W];
            for (int w = 0; w < W; ++w) v[w] = pairs(&pairs_[(p * W + w) * LANES]);
            for (int r = 0; r < R; ++r) {
                uint32_t pair;
                std::memcpy(&pair, weights + r * BLOCK + 2 * p, sizeof pair);
                for (int w = 0; w < W; ++w) acc[r][w] = _mm512_dpbf16_ps(acc[r][w], both(pair), v[w]);
            }
        }
        prefetcher = next;
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w) {
                float* sum = sums + r * dim_ + w * LANES;
                _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), acc[r][w]));
            }
    }

    int dim_;
    float scale_;
    Buffer<uint32_t> queries_;
    Buffer<float> keys_t_, pairs_;
};

static inline void store(BFloat16* p, Vec v) {
    __m256bh half = _mm512_cvtneps_pbh(reinterpret<__m512>(v));
    std::memcpy(p, &half, sizeof half);
}
#endif
