// Pages of keys or values as they lie in memory.

#pragma once

#include <algorithm>
#include <cstdint>

// Consecutive rows of entries; the stride counts entries.
template <typename T> struct Rows {
    const T* data;
    int64_t stride;
};

// A tensor [pages, heads, page_tokens, dim]; strides count entries, rows are contiguous.
template <typename T> struct Pages {
    using Entry = T;
    const T* data;
    int64_t page_stride, head_stride, row_stride, page_tokens;
    const T* at(int64_t head, int64_t token) const {
        return data + token / page_tokens * page_stride + head * head_stride + token % page_tokens * row_stride;
    }

    // The rows of a block, which lies within a page. Entries in another form are decoded into `scratch`
    // [BLOCK][dim] first; these are read in place.
    Rows<T> block(int64_t head, int64_t token, int, T*) const { return {at(head, token), row_stride}; }

    // What to prefetch while the block before is computed.
    const T* ahead(int64_t head, int64_t token) const { return at(head, token); }
};

// The tokens that one token of a tree sees: the first `shared` ones of some pages, and behind them those in rows `path`.
template <typename T> struct Path {
    using Entry = T;
    Pages<T> pages;
    const int32_t* path;
    int64_t shared, page_tokens, dim;

    Rows<T> block(int64_t head, int64_t token, int tokens, T* scratch) const {
        if (token + tokens <= shared) return pages.block(head, token, tokens, scratch);
        for (int64_t at = token; at < token + tokens; ++at)
            std::copy_n(pages.at(head, at < shared ? at : path[at - shared]), dim, scratch + (at - token) * dim);
        return {scratch, dim};
    }

    const T* ahead(int64_t head, int64_t token) const { return pages.at(head, token); }
};
