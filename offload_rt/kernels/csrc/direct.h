// Products with rows of a matrix as they lie in memory, whose sums are reduced across lanes.

#pragma once

#include "vectors.h"

// For loops that need a register for every accumulator: inlined, the compiler would spill some of them.
#define OWN_REGISTERS __attribute__((noinline))

// Scores `lanes` consecutive keys, at most KEYS, with R queries: a row of the result holds KEYS scores.
// `keys(k, d)` are STEP entries of a key from `d` on. With Ahead, fetches as many keys that follow.
template <int R, int KEYS, bool Full, bool Ahead, typename Products, typename Keys>
static inline Vec score_keys(const Products& products, int first, Keys& keys, int lanes, int dim) {
    Vec acc[LANES] = {};
    for (int d = 0; d < dim; d += Products::STEP) {
        typename Products::Row queries[R];
        for (int r = 0; r < R; ++r) queries[r] = products.query(first + r, d);
        for (int k = 0; k < KEYS; ++k) {
            if (!Full && k >= lanes) break;
            if (Ahead) keys.prefetch(KEYS + k, d);
            const auto key = reinterpret<typename Products::Row>(keys(k, d));
            for (int r = 0; r < R; ++r) acc[r * KEYS + k] = Products::add_product(acc[r * KEYS + k], queries[r], key);
        }
    }
    return lane_sums(acc);
}
