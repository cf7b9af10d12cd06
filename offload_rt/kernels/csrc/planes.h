// Weights in two planes. kernels/planes.py describes the form and is the reference.

#pragma once

#include <cstdint>

#include "vectors.h"

// A matrix in two planes (`_Planes`): `codes` [outs][ins] of the draft plane, `rests` [outs][ins / 2] of the rest plane,
// `lows` [outs], and the weights that do not fit, those of a row from `starts` [outs + 1] on.
struct Planes {
    const uint8_t *codes, *rests;
    const int16_t* lows;
    const int32_t *starts, *columns;
    const BFloat16* listed;
};

// Returns the bits of a weight: the sign of its code, and its number above the low of its row, or zero.
static inline uint16_t weight_bits(uint8_t code, uint16_t number, uint16_t low, bool zero) {
    return uint16_t((code & 128) << 8 | (zero ? 0 : number + low));
}

// Expands a row as drafts read it, in the middle of what the rest plane tells apart.
static inline void expand_draft(const Planes& planes, int64_t row, int64_t ins, BFloat16* __restrict to) {
    const uint8_t* __restrict codes = planes.codes + row * ins;
    const uint16_t middle = uint16_t(planes.lows[row] + 8);
    uint16_t* __restrict out = &to->bits;
    for (int64_t d = 0; d < ins; ++d) {
        const uint16_t code = codes[d] & 127;
        out[d] = weight_bits(codes[d], uint16_t(code << 4), middle, !code);
    }
}

// Expands a row as it was.
static inline void expand_exact(const Planes& planes, int64_t row, int64_t ins, BFloat16* __restrict to) {
    const int64_t half = ins / 2;
    const uint8_t *__restrict codes = planes.codes + row * ins, *__restrict rests = planes.rests + row * half;
    const uint16_t low = uint16_t(planes.lows[row]);
    uint16_t* __restrict out = &to->bits;
    for (int64_t d = 0; d < half; ++d) {
        const uint16_t number = uint16_t((codes[d] & 127) << 4 | (rests[d] & 15));
        out[d] = weight_bits(codes[d], number, low, !number);
    }
    for (int64_t d = 0; d < half; ++d) {
        const uint16_t number = uint16_t((codes[half + d] & 127) << 4 | rests[d] >> 4);
        out[half + d] = weight_bits(codes[half + d], number, low, !number);
    }
    for (int64_t at = planes.starts[row]; at < planes.starts[row + 1]; ++at) to[planes.columns[at]] = planes.listed[at];
}
