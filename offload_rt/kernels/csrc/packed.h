// Packed pages: bfloat16 in 12 bits. cpu_kv/packed.py describes the form and is the reference.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pages.h"
#include "vectors.h"

constexpr int ESCAPE = 15;

// The shape of a page, and the bytes at which the parts of its packed form lie (`PackedShape`).
struct PackedShape {
    int64_t heads, page_tokens, dim, words, bases_at, rows_at, nbytes;

    int64_t sides() const { return 2 * heads; }
    int64_t row_bytes() const { return 3 * dim / 2; }
    const uint8_t* bases(const uint8_t* page, int64_t side_head) const { return page + bases_at + side_head * dim; }
    const uint8_t* row(const uint8_t* page, int64_t side_head, int64_t token) const {
        return page + rows_at + (side_head * page_tokens + token) * row_bytes();
    }
};

// Of an escape, whose exponent is replaced, the sign must stay as it is: so exponents have 8 bits.
static inline uint16_t joined(uint16_t exact, uint8_t exponent) {
    return uint16_t((exact & 128) << 8 | exponent << 7 | (exact & 127));
}

// Unpacks consecutive tokens of a head of the keys or values (`side_head`: of both, counted from the keys') to
// `out` [tokens][dim].
static inline void unpack(const PackedShape& shape, const uint8_t* page, int64_t side_head, int64_t token, int64_t tokens,
                          BFloat16* __restrict out) {
    const int64_t dim = shape.dim, half = dim / 2;
    const uint8_t* __restrict bases = shape.bases(page, side_head);
    const uint8_t* __restrict row = shape.row(page, side_head, token);
    for (int64_t t = 0; t < tokens; ++t, row += shape.row_bytes()) {
        const uint8_t* __restrict codes = row + dim;
        uint16_t* __restrict to = &out[t * dim].bits;
        for (int64_t d = 0; d < half; ++d) to[d] = joined(row[d], uint8_t(bases[d] + (codes[d] & 15)));
        for (int64_t d = 0; d < half; ++d) to[half + d] = joined(row[half + d], uint8_t(bases[half + d] + (codes[d] >> 4)));
    }
    const uint32_t* list = reinterpret_cast<const uint32_t*>(page);
    const uint32_t *end = list + 1 + std::min<int64_t>(list[0], shape.words - 1), first = uint32_t((side_head * shape.page_tokens + token) * dim);
    const uint32_t* entry = std::lower_bound(list + 1, end, first << 8);
    for (; entry < end && *entry >> 8 < first + tokens * dim; ++entry) {
        uint16_t& bits = out[(*entry >> 8) - first].bits;
        bits = uint16_t((bits & 0x807F) | (*entry & 255) << 7);
    }
}

// Packs one page [2][heads][page_tokens][dim].
static inline void pack(const PackedShape& shape, const uint16_t* __restrict values, uint8_t* __restrict page) {
    const int64_t dim = shape.dim, half = dim / 2;
    std::vector<uint8_t> row_codes(dim);
    uint8_t* __restrict code = row_codes.data();
    uint32_t *list = reinterpret_cast<uint32_t*>(page), escapes = 0, position = 0;
    for (int64_t side_head = 0; side_head < shape.sides(); ++side_head) {
        uint8_t* __restrict bases = page + shape.bases_at + side_head * dim;
        const uint16_t* __restrict head = values + side_head * shape.page_tokens * dim;
        std::fill_n(bases, dim, uint8_t(ESCAPE - 1));  // of the largest exponent, less than this counts as this
        for (int64_t t = 0; t < shape.page_tokens; ++t)
            for (int64_t d = 0; d < dim; ++d) bases[d] = std::max(bases[d], uint8_t(head[t * dim + d] >> 7));
        for (int64_t d = 0; d < dim; ++d) bases[d] -= ESCAPE - 1;
        uint8_t* __restrict row = page + shape.rows_at + side_head * shape.page_tokens * shape.row_bytes();
        for (int64_t t = 0; t < shape.page_tokens; ++t, row += shape.row_bytes(), position += dim) {
            const uint16_t* __restrict from = head + t * dim;
            uint8_t escaped = 0;
            for (int64_t d = 0; d < dim; ++d) {
                row[d] = uint8_t((from[d] >> 8 & 128) | (from[d] & 127));
                const uint8_t distance = uint8_t(uint8_t(from[d] >> 7) - bases[d]);  // wraps below the base
                code[d] = std::min(distance, uint8_t(ESCAPE));
                escaped = std::max(escaped, code[d]);
            }
            for (int64_t d = 0; d < half; ++d) row[dim + d] = uint8_t(code[d] | code[half + d] << 4);
            if (escaped < ESCAPE) continue;
            for (int64_t d = 0; d < dim; ++d)
                if (code[d] == ESCAPE && ++escapes < shape.words)
                    list[escapes] = (position + uint32_t(d)) << 8 | (from[d] >> 7 & 255);
        }
    }
    list[0] = escapes;
    for (int64_t word = int64_t(escapes) + 1; word < shape.words; ++word) list[word] = 0;
    const int64_t end = shape.rows_at + shape.sides() * shape.page_tokens * shape.row_bytes();
    std::memset(page + end, 0, size_t(shape.nbytes - end));
}

// The keys (`side` 0) or values of consecutive packed pages, for attention.
struct PackedPages {
    using Entry = BFloat16;
    const uint8_t* data;
    int64_t page_tokens, side;
    PackedShape shape;

    Rows<BFloat16> block(int64_t head, int64_t token, int tokens, BFloat16* scratch) const {
        unpack(shape, data + token / page_tokens * shape.nbytes, side * shape.heads + head, token % page_tokens, tokens,
               scratch);
        return {scratch, shape.dim};
    }

    // The rows of a block are three quarters as long as they are unpacked: the next block's first ones follow.
    const BFloat16* ahead(int64_t head, int64_t token) const {
        const uint8_t* page = data + token / page_tokens * shape.nbytes;
        return reinterpret_cast<const BFloat16*>(shape.row(page, side * shape.heads + head, token % page_tokens));
    }
};
