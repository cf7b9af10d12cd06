// Products with rows of a matrix as they lie in memory, whose sums are reduced across lanes.

#pragma once

#include "vectors.h"

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
