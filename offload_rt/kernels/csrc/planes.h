// Weights in two planes. kernels/planes.py describes the form and is the reference.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "vectors.h"

constexpr int PLANE_BLOCK = 64;  // columns whose rests are in half as many bytes

// A matrix in two planes (`_Planes`): `codes` [outs][ins] of the draft plane, `rests` [outs][ins / 2] of the rest plane,
// `lows` [outs], and the weights that do not fit, those of a row from `starts` [outs + 1] on, in order of their columns.
struct Planes {
    const uint8_t *codes, *rests;
    const int16_t* lows;
    const int32_t *starts, *columns;
    const BFloat16* listed;
};

// Some rows of planes from `first` on, whose columns are expanded COUNT at a time to the bits of bfloat16 in the upper half
// of a Word of 32 bits, or in one of 16 bits. Exact rows are read in order of their columns.
template <bool Draft, typename Word, int COUNT> class PlaneRows {
  public:
    static constexpr int MOST = 16;  // rows
    typedef Word Columns __attribute__((vector_size(COUNT * sizeof(Word))));

    PlaneRows(const Planes& planes, int64_t first, int rows, int64_t ins)
        : codes_(planes.codes + first * ins), rests_(planes.rests + first * ins / 2), ins_(ins), columns_(planes.columns),
          listed_(planes.listed) {
        for (int k = 0; k < rows; ++k) {
            const Word low = Word(Word(planes.lows[first + k] + (Draft ? 8 : 0)) << SHIFT);
            lows_[k] = low - Columns{};
            if constexpr (Draft) continue;
            next_[k] = planes.starts[first + k];
            last_[k] = planes.starts[first + k + 1];
            upcoming_[k] = upcoming(k);
        }
    }

    // Returns columns d .. d + COUNT of a row.
    inline Columns operator()(int k, int d) {
        // The sign of a code is that of the weight, and the bits below it are the upper seven of its number.
        const Columns upper = widened<int8_t>(codes_ + k * ins_ + d) << (4 + SHIFT) & NUMBER;
        if constexpr (Draft) return upper + lows_[k];
        const uint8_t* rests = rests_ + (k * ins_ + (d & -PLANE_BLOCK)) / 2 + (d & (PLANE_BLOCK / 2 - 1));
        const int second = d & PLANE_BLOCK / 2 ? 4 : 0;
        const Columns number = upper | (widened<uint8_t>(rests) >> second & 15) << SHIFT;
        Columns bits = lifted(number, lows_[k]);
        if (__builtin_expect(upcoming_[k] < d + COUNT, 0)) put_listed(k, d, bits);
        return bits;
    }

    // Fetches columns of the row of as many rows further on.
    inline void prefetch(int k, int d) const {
        if (d % 64 == 0) __builtin_prefetch(codes_ + k * ins_ + d, 0, 2);
        if (!Draft && d % 128 == 0) __builtin_prefetch(rests_ + (k * ins_ + d) / 2, 0, 2);
    }

  private:
    static constexpr int SHIFT = 8 * sizeof(Word) - 16;
    static constexpr Word NUMBER = Word(0x87f0u << SHIFT), SIZE = Word(0x7fffu << SHIFT);

    int32_t upcoming(int k) const { return next_[k] < last_[k] ? columns_[next_[k]] : std::numeric_limits<int32_t>::max(); }

    // Widens bytes. GCC 12 does so half by half, or one by one.
    template <typename Byte> static inline Columns widened(const uint8_t* from) {
        Byte __attribute__((vector_size(COUNT))) bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        constexpr bool SIGNED = std::is_signed_v<Byte>, WIDE = sizeof(Word) == 4;
#if defined(__AVX512BW__)
        if constexpr (sizeof(Columns) == 64 && !WIDE) {
            const __m256i given = reinterpret<__m256i>(bytes);
            return reinterpret<Columns>(SIGNED ? _mm512_cvtepi8_epi16(given) : _mm512_cvtepu8_epi16(given));
        }
        if constexpr (sizeof(Columns) == 64 && WIDE) {
            const __m128i given = reinterpret<__m128i>(bytes);
            return reinterpret<Columns>(SIGNED ? _mm512_cvtepi8_epi32(given) : _mm512_cvtepu8_epi32(given));
        }
#endif
#if defined(__AVX2__)
        if constexpr (sizeof(Columns) == 32 && !WIDE) {
            const __m128i given = reinterpret<__m128i>(bytes);
            return reinterpret<Columns>(SIGNED ? _mm256_cvtepi8_epi16(given) : _mm256_cvtepu8_epi16(given));
        }
        if constexpr (sizeof(Columns) == 32 && WIDE) {
            const __m128i given = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
            return reinterpret<Columns>(SIGNED ? _mm256_cvtepi8_epi32(given) : _mm256_cvtepu8_epi32(given));
        }
#endif
        return __builtin_convertvector(bytes, Columns);
    }

    // Adds the low of a row to numbers other than zero.
    static inline Columns lifted(Columns number, Columns low) {
#if defined(__AVX512BW__)
        if constexpr (sizeof(Columns) == 64 && sizeof(Word) == 2) {
            const __m512i given = reinterpret<__m512i>(number);
            const __mmask32 nonzero = _mm512_test_epi16_mask(given, _mm512_set1_epi16(SIZE));
            return reinterpret<Columns>(_mm512_mask_add_epi16(given, nonzero, given, reinterpret<__m512i>(low)));
        }
#endif
        return number + (((number & SIZE) != 0) & low);
    }

    // Without a call, around which no vector would stay in its register.
    __attribute__((always_inline)) inline void put_listed(int k, int d, Columns& bits) {
        Word weights[COUNT];
        std::memcpy(weights, &bits, sizeof bits);
        for (; upcoming_[k] < d + COUNT; ++next_[k], upcoming_[k] = upcoming(k))
            if (upcoming_[k] >= d) weights[upcoming_[k] - d] = Word(listed_[next_[k]].bits << SHIFT);
        std::memcpy(&bits, weights, sizeof bits);
    }

    const uint8_t *codes_, *rests_;
    int64_t ins_;
    const int32_t* columns_;
    const BFloat16* listed_;
    Columns lows_[MOST];
    int32_t upcoming_[MOST], next_[MOST], last_[MOST];
};

// Expands rows first .. first + rows, at most MOST, to weights [rows][ins].
template <bool Draft> static void expand_rows(const Planes& planes, int64_t first, int rows, int64_t ins, BFloat16* weights) {
    constexpr int COUNT = 2 * LANES;
    PlaneRows<Draft, int16_t, COUNT> expanded(planes, first, rows, ins);
    for (int k = 0; k < rows; ++k)
        for (int d = 0; d < ins; d += COUNT) {
            expanded.prefetch(rows + k, d);
            const auto bits = expanded(k, d);
            std::memcpy(weights + k * ins + d, &bits, sizeof bits);
        }
}

// A matrix [outs][ins] to be split (`_Split`). `counts` [outs] are those of weights that do not fit.
struct Split {
    const BFloat16* weights;
    int64_t outs, ins, threads;
    uint8_t *codes, *rests;
    int16_t* lows;
    int64_t* counts;
};

// Returns how far the size of a weight is above the low of its row, or zero below it.
static inline uint16_t number_of(uint16_t bits, int low) { return uint16_t(std::max((bits & 0x7fff) - low, 0)); }

static void split_row(const Split& split, int64_t row) {
    const int64_t ins = split.ins;
    const uint16_t* bits = &(split.weights + row * ins)->bits;
    uint8_t *codes = split.codes + row * ins, *rests = split.rests + row * ins / 2;
    uint16_t largest = 0;
    for (int64_t d = 0; d < ins; ++d) largest = std::max(largest, uint16_t(bits[d] & 0x7fff));
    const int low = std::max(largest - 2047, 0);
    int32_t count = 0;
    for (int64_t d = 0; d < ins; d += PLANE_BLOCK, bits += PLANE_BLOCK, codes += PLANE_BLOCK, rests += PLANE_BLOCK / 2) {
        uint16_t numbers[PLANE_BLOCK];
        for (int i = 0; i < PLANE_BLOCK; ++i) {
            numbers[i] = number_of(bits[i], low);
            codes[i] = uint8_t(bits[i] >> 8 & 128 | numbers[i] >> 4);
            count += !numbers[i] && (bits[i] & 0x7fff);
        }
        for (int i = 0; i < PLANE_BLOCK / 2; ++i) rests[i] = uint8_t(numbers[i] & 15 | (numbers[i + PLANE_BLOCK / 2] & 15) << 4);
    }
    split.lows[row] = int16_t(low);
    split.counts[row] = count;
}

extern "C" {

void offload_rt_split(const Split* split) {
#pragma omp parallel for num_threads(int(split->threads)) schedule(static) if (split->threads > 1)
    for (int64_t row = 0; row < split->outs; ++row) split_row(*split, row);
}

// Lists the weights that do not fit, one row after the other, and their columns.
void offload_rt_list(const Split* split, int32_t* columns, BFloat16* listed) {
    for (int64_t row = 0; row < split->outs; ++row) {
        if (!split->counts[row]) continue;
        const BFloat16* weights = split->weights + row * split->ins;
        for (int32_t d = 0; d < split->ins; ++d)
            if ((weights[d].bits & 0x7fff) && !number_of(weights[d].bits, split->lows[row])) *columns++ = d, *listed++ = weights[d];
    }
}
}
