// Memory that will be read soon, fetched while other work is done.

#pragma once

#include <cstdint>

// Fetches a range into the second-level cache, a few lines at each step of the work: in one burst it would
// fill the processor's queue of misses, and the work would wait. A fetch past the end of memory is no fault.
class Ahead {
  public:
    template <typename T>
    Ahead(const T* first, int64_t entries, int64_t steps)
        : at_(reinterpret_cast<const char*>(first)), last_(reinterpret_cast<const char*>(first + entries)),
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
