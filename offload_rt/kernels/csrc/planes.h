// Weights in two planes. kernels/planes.py describes the form and is the reference.

#pragma once

#include <cstdint>
#include <limits>

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
        int8_t __attribute__((vector_size(COUNT))) codes;
        std::memcpy(&codes, codes_ + k * ins_ + d, sizeof codes);
        // The sign of a code is that of the weight, and the bits below it are the upper seven of its number.
        const Columns upper = __builtin_convertvector(codes, Columns) << (4 + SHIFT) & NUMBER;
        if constexpr (Draft) return upper + lows_[k];
        uint8_t __attribute__((vector_size(COUNT))) rests;
        std::memcpy(&rests, rests_ + (k * ins_ + (d & -PLANE_BLOCK)) / 2 + (d & (PLANE_BLOCK / 2 - 1)), sizeof rests);
        const int second = d & PLANE_BLOCK / 2 ? 4 : 0;
        const Columns lower = (__builtin_convertvector(rests, Columns) >> second & 15) << SHIFT;
        const Columns number = upper | lower;
        Columns bits = (number & SIZE) != 0 ? number + lows_[k] : number;
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

    __attribute__((noinline)) void put_listed(int k, int d, Columns& bits) {
        for (; upcoming_[k] < d + COUNT; ++next_[k], upcoming_[k] = upcoming(k))
            if (upcoming_[k] >= d) bits[upcoming_[k] - d] = Word(listed_[next_[k]].bits << SHIFT);
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
    constexpr int COUNT = PLANE_BLOCK / 2;
    PlaneRows<Draft, int16_t, COUNT> expanded(planes, first, rows, ins);
    for (int k = 0; k < rows; ++k)
        for (int d = 0; d < ins; d += COUNT) {
            expanded.prefetch(rows + k, d);
            const auto bits = expanded(k, d);
            std::memcpy(weights + k * ins + d, &bits, sizeof bits);
        }
}
