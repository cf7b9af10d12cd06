// Prefetching of memory that will be read soon.

#pragma once

#include <cstdint>

// Fetches the next rows into the second cache, a few lines per step of the work: one burst would fill the
// processor's queue of misses and stall the work. The first cache is too small: it would lose what the work
// uses now, and attention took up to half as long again. A prefetch past the end of memory does not fault. Rows with
// gaps between them are left to the hardware prefetcher.
class Prefetcher {
  public:
    template <typename T>
    Prefetcher(const T* first, int rows, int dim, int64_t stride, int steps)
        : at_(reinterpret_cast<const char*>(first)),
          last_(at_ + (stride == dim ? rows * stride * int64_t(sizeof(T)) : 0)),
          lines_(int((last_ - at_ + LINE * steps - 1) / (LINE * steps))) {}

    inline void step() {
        for (int line = 0; line < lines_; ++line) {
            __builtin_prefetch(at_, 0, 2);
            at_ += LINE;
        }
        if (at_ > last_) at_ = last_;
    }

  private:
    static constexpr int64_t LINE = 64;
    const char *at_, *last_;
    int lines_;
};
