// Scores of few queries, from keys as they lie in memory: what is reduced across lanes then costs less than a
// transposition of the keys, which pays from DIRECT_ROWS queries on.

#pragma once

#include "block.h"
#include "prefetch.h"
#include "vectors.h"

constexpr int DIRECT_ROWS = 4;

// For loops that need a register for every accumulator: inlined, the compiler would spill some of them.
#define OWN_REGISTERS __attribute__((noinline))

// Scores `lanes` consecutive keys, at most LANES / R, with R queries: a row of the result holds LANES / R scores.
// With Ahead, fetches as many keys that follow.
template <int R, bool Full, bool Ahead = false, typename Products, typename T>
static inline Vec score_keys(const Products& products, int first, const T* keys, int64_t stride, int lanes, int dim) {
    constexpr int KEYS = LANES / R;
    Vec acc[LANES] = {};
    for (int d = 0; d < dim; d += Products::STEP) {
        typename Products::Row queries[R];
        for (int r = 0; r < R; ++r) queries[r] = products.query(first + r, d);
        for (int k = 0; k < KEYS; ++k) {
            if (!Full && k >= lanes) break;
            if (Ahead) __builtin_prefetch(keys + (KEYS + k) * stride + d, 0, 2);
            const auto key = Products::row(keys + k * stride + d);
            for (int r = 0; r < R; ++r) acc[r * KEYS + k] = Products::add_product(acc[r * KEYS + k], queries[r], key);
        }
    }
    return lane_sums(acc);
}

// Computes scores [R][BLOCK] of queries first .. first + R with `block_tokens` keys, times `scale`.
template <int R, typename Products, typename T>
static void score_direct(const Products& products, int first, const T* keys, int64_t stride, int block_tokens, int dim,
                         float scale, float* scores, Prefetcher& prefetcher) {
    constexpr int KEYS = LANES / R;
    Prefetcher next = prefetcher;  // in registers
    for (int k = 0; k < block_tokens; k += KEYS) {
        next.step();
        const T* row = keys + k * stride;
        const int left = block_tokens - k;
        Vec found = left >= KEYS ? score_keys<R, true>(products, first, row, stride, KEYS, dim)
                                 : score_keys<R, false>(products, first, row, stride, left, dim);
        next.step();
        found *= scale;
        for (int r = 0; r < R; ++r)
            std::memcpy(scores + r * BLOCK + k, reinterpret_cast<float*>(&found) + r * KEYS, KEYS * sizeof(float));
    }
    prefetcher = next;
}

// Does so for `count` queries, at most DIRECT_ROWS; `next` are the keys to prefetch.
template <typename Products, typename T>
static void score_few(const Products& products, int base, const T* keys, const T* next, int64_t stride, int block_tokens,
                      int count, int dim, float scale, float* scores) {
    const int at_once = count >= 4 ? 4 : count >= 2 ? 2 : 1;
    Prefetcher prefetcher(next, BLOCK, dim, stride, 2 * BLOCK * at_once / LANES);
    int r = 0;
    if (count >= 4) score_direct<4>(products, base, keys, stride, block_tokens, dim, scale, scores, prefetcher), r = 4;
    if (count - r >= 2)
        score_direct<2>(products, base + r, keys, stride, block_tokens, dim, scale, scores + r * BLOCK, prefetcher), r += 2;
    if (count > r)
        score_direct<1>(products, base + r, keys, stride, block_tokens, dim, scale, scores + r * BLOCK, prefetcher);
}
