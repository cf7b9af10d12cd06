// Keys and values of 8 or 4 bits (kernels/quantized.py): a code c stands for zero + step * c.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "bf16_dots.h"
#include "pages.h"
#include "vectors.h"

typedef uint8_t ByteVec __attribute__((vector_size(LANES)));

#ifndef OFFLOAD_RT_BF16_DOTS
static inline void store(BFloat16* p, Vec v) {
    for (int lane = 0; lane < LANES; ++lane) narrow(v[lane], p + lane);
}
#endif

// One side of a layer [heads, tokens, bytes]. Zero and step are [heads, tokens / group, 2, dim] where they differ
// by channel, as those of keys, and [heads, tokens, 2] of values, whose `group` is 1. Strides of codes count
// bytes. A block begins with a group.
template <typename T, int BITS> struct Quantized {
    using Entry = T;
    uint8_t* codes;
    BFloat16* ranges;
    int64_t head_stride, row_stride, range_head_stride, page_tokens, group, dim;

    Rows<T> block(int64_t head, int64_t token, int tokens, T* scratch) const {
        const uint8_t* rows = codes + head * head_stride + token * row_stride;
        const BFloat16* range = ranges + head * range_head_stride + token / group * 2 * (group == 1 ? 1 : dim);
        if (group == 1)
            for (int k = 0; k < tokens; ++k, range += 2) {
                const Vec zero = splat(widen(range[0])), step = splat(widen(range[1]));
                for (int d = 0; d < width(); d += LANES)
                    decode(rows + k * row_stride + d, scratch + k * dim + d, zero, step, zero, step);
            }
        else
            for (int first = 0; first < tokens; first += int(group), range += 2 * dim) {
                const int last = int(std::min<int64_t>(tokens, first + group));
                for (int d = 0; d < width(); d += LANES) {
                    const Vec zero = load(range + d), step = load(range + dim + d);
                    const BFloat16* high = range + (BITS == 8 ? 0 : width()) + d;  // channels in high halves of bytes
                    const Vec high_zero = load(high), high_step = load(high + dim);
                    for (int k = first; k < last; ++k)
                        decode(rows + k * row_stride + d, scratch + k * dim + d, zero, step, high_zero, high_step);
                }
            }
        return {scratch, dim};
    }

    // Codes are shorter than what they stand for: those of the blocks behind it are fetched too.
    const T* ahead(int64_t head, int64_t token) const {
        return reinterpret_cast<const T*>(codes + head * head_stride + token * row_stride);
    }

  private:
    // Bytes of a row.
    int width() const { return int(BITS == 8 ? dim : dim / 2); }

    void decode(const uint8_t* from, T* to, Vec zero, Vec step, Vec high_zero, Vec high_step) const {
        ByteVec bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        if constexpr (BITS == 8) {
            store(to, add_product(zero, step, floats(bytes)));
        } else {
            store(to, add_product(zero, step, floats(bytes & 15)));
            store(to + width(), add_product(high_zero, high_step, floats(bytes >> 4)));
        }
    }

    static Vec floats(ByteVec bytes) {
#if defined(__AVX512F__)
        // GCC 12 widens the bytes one by one otherwise.
        return reinterpret<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(reinterpret<__m128i>(bytes))));
#else
        return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
    }
};

// What `offload_rt_quantize_…` takes (`_Quantize` in native.py): rows of keys or values [heads, tokens, dim], whose
// strides count entries, and where they go.
template <typename T, int BITS> struct Quantize {
    const T* rows;
    int64_t head_stride, row_stride, heads, tokens, threads;
    Quantized<T, BITS> into;

    static constexpr float MOST = (1 << BITS) - 1, SLACK = 1.0f / 256;

    void run() const {
        const int64_t group = into.group, groups = tokens / group;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
        for (int64_t number = 0; number < heads * groups; ++number) {
            const int64_t head = number / groups, first = number % groups * group;
            const T* from = rows + head * head_stride + first * row_stride;
            uint8_t* codes = into.codes + head * into.head_stride + first * into.row_stride;
            BFloat16* ranges = into.ranges + head * into.range_head_stride;
            group == 1 ? by_token(from, codes, ranges + first * 2) : by_channel(from, codes, ranges + number % groups * 2 * into.dim);
        }
    }

  private:
    // Zero and step of values from `low` to `high`, which zero + MOST * step holds though both are rounded.
    static void range(float low, float high, BFloat16* zero, BFloat16* step) {
        narrow(low - std::abs(low) * SLACK, zero);
        narrow((high - widen(*zero)) * ((1 + 2 * SLACK) / MOST), step);
    }

    static Vec smaller(Vec x, Vec y) { return y < x ? y : x; }
    static float lowest(Vec x) { return -highest(-x); }

    static Vec code(Vec x, Vec zero, Vec step) {
        const Vec magic = splat(12582912.0f);  // as in exp2_nonpositive
        Vec code = (x - zero) / larger(step, splat(1.17549435e-38f));
        return smaller(larger(code, Vec{}), splat(MOST)) + magic - magic;
    }

    template <typename Zero, typename Step>
    void encode(const T* row, uint8_t* codes, const Zero& zero, const Step& step) const {
        const int width = BITS == 8 ? int(into.dim) : int(into.dim / 2);
        for (int d = 0; d < width; d += LANES) {
            IntVec bits = __builtin_convertvector(code(load(row + d), zero(d), step(d)), IntVec);
            if (BITS == 4)
                bits |= __builtin_convertvector(code(load(row + width + d), zero(width + d), step(width + d)), IntVec) << 4;
            ByteVec bytes = __builtin_convertvector(bits, ByteVec);
            std::memcpy(codes + d, &bytes, sizeof bytes);
        }
    }

    void by_token(const T* row, uint8_t* codes, BFloat16* of_token) const {
        Vec low = load(row), high = low;
        for (int d = LANES; d < into.dim; d += LANES) {
            low = smaller(low, load(row + d));
            high = larger(high, load(row + d));
        }
        range(lowest(low), highest(high), of_token, of_token + 1);
        const Vec zero = splat(widen(of_token[0])), step = splat(widen(of_token[1]));
        encode(row, codes, [&](int) { return zero; }, [&](int) { return step; });
    }

    void by_channel(const T* from, uint8_t* codes, BFloat16* of_group) const {
        for (int d = 0; d < into.dim; d += LANES) {
            Vec low = load(from + d), high = low;
            for (int64_t k = 1; k < into.group; ++k) {
                low = smaller(low, load(from + k * row_stride + d));
                high = larger(high, load(from + k * row_stride + d));
            }
            for (int lane = 0; lane < LANES; ++lane)
                range(low[lane], high[lane], of_group + d + lane, of_group + into.dim + d + lane);
        }
        for (int64_t k = 0; k < into.group; ++k)
            encode(from + k * row_stride, codes + k * into.row_stride, [&](int d) { return load(of_group + d); },
                   [&](int d) { return load(of_group + into.dim + d); });
    }
};
