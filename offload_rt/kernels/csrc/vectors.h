// Vectors by compiler extensions: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

struct BFloat16 { uint16_t bits; };

// Working memory aligned to cache lines, as a vector across two lines takes two loads.
template <typename T> class Buffer {
  public:
    explicit Buffer(size_t count) {
        data_ = static_cast<T*>(std::aligned_alloc(LINE, (count * sizeof(T) + LINE - 1) / LINE * LINE));
        if (count && !data_) throw std::bad_alloc();
    }
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    static constexpr size_t LINE = 64;
    T* data_;
};

template <typename To, typename From> static inline To reinterpret(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

static inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline Vec load(const BFloat16* p) {
    HalfVec half;
    std::memcpy(&half, p, sizeof half);
    return reinterpret<Vec>(__builtin_convertvector(half, IntVec) << 16);
}

static inline float widen(float x) { return x; }
static inline float widen(BFloat16 x) { return reinterpret<float>(uint32_t(x.bits) << 16); }
static inline void narrow(float x, float* p) { *p = x; }
static inline void narrow(float x, BFloat16* p) {
    uint32_t bits = reinterpret<uint32_t>(x);
    p->bits = std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline Vec splat(float x) { return x - Vec{}; }

// Returns sums + x * y, rounded once where the processor can. The compiler is told to fuse nothing by itself: tuned for
// some processors, it does so in one loop and not in another, and a sum would depend on the loop that it is taken in.
static inline Vec add_product(Vec sums, Vec x, Vec y) {
#if defined(__AVX512F__)
    return reinterpret<Vec>(_mm512_fmadd_ps(reinterpret<__m512>(x), reinterpret<__m512>(y), reinterpret<__m512>(sums)));
#elif defined(__AVX2__) && defined(__FMA__)
    return reinterpret<Vec>(_mm256_fmadd_ps(reinterpret<__m256>(x), reinterpret<__m256>(y), reinterpret<__m256>(sums)));
#else
    return sums + x * y;
#endif
}

// Returns y in lanes where it is larger, else x, also where one of them is NaN.
static inline Vec larger(Vec x, Vec y) {
#if defined(__AVX512F__)
    // GCC 12 compiles the other form to a comparison and a blend.
    return reinterpret<Vec>(_mm512_max_ps(reinterpret<__m512>(y), reinterpret<__m512>(x)));
#else
    return y > x ? y : x;
#endif
}

// 2^x for x <= 0, 0 below -126.5, NaN for NaN; relative error below 2e-7.
static inline Vec exp2_nonpositive(Vec x) {
    const Vec least = splat(-127.0f);  // its power below has the exponent bits of zero
    x = larger(x, least);
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    Vec shifted = x + magic;
    Vec f = x - (shifted - magic);
    Vec p = splat(1.5403530e-4f);
    p = add_product(splat(1.3333558e-3f), p, f);
    p = add_product(splat(9.6181291e-3f), p, f);
    p = add_product(splat(5.5504109e-2f), p, f);
    p = add_product(splat(2.4022651e-1f), p, f);
    p = add_product(splat(6.9314718e-1f), p, f);
    p = add_product(splat(1.0f), p, f);
    IntVec power = (reinterpret<IntVec>(shifted) << 23) + (127 << 23);
    return p * reinterpret<Vec>(power);
}

// The binary logarithm of normal numbers x > 0, NaN for NaN; absolute error below 6e-7 up to 2^16.
static inline Vec log2_positive(Vec x) {
    IntVec bits = reinterpret<IntVec>(x), exponent = (bits - 0x3f3504f3) >> 23;  // of a mantissa near 1
    Vec m = reinterpret<Vec>(bits - (exponent << 23));
    Vec s = (m - 1.0f) / (m + 1.0f), square = s * s;  // log(m) is 2 * atanh(s)
    Vec p = splat(0.32059890f);
    p = add_product(splat(0.41219858f), p, square);
    p = add_product(splat(0.57707802f), p, square);
    p = add_product(splat(0.96179669f), p, square);
    p = add_product(splat(2.88539008f), p, square);
    return p * s + __builtin_convertvector(exponent, Vec) + (x - x);  // the last term is zero or NaN
}

// Does one step of a LANES x LANES transposition: swaps the off-diagonal blocks of size H.
template <int H> static inline void swap_blocks(Vec* rows) {
    IntVec low, high;
    for (int lane = 0; lane < LANES; ++lane) {
        low[lane] = (lane & H) ? LANES + lane - H : lane;
        high[lane] = (lane & H) ? LANES + lane : lane + H;
    }
    for (int i = 0; i < LANES; ++i) {
        if (i & H) continue;
        Vec a = rows[i], b = rows[i + H];
        rows[i] = __builtin_shuffle(a, b, low);
        rows[i + H] = __builtin_shuffle(a, b, high);
    }
}

static inline void transpose(Vec* rows) {
    if constexpr (LANES == 16) swap_blocks<8>(rows);
    if constexpr (LANES >= 8) swap_blocks<4>(rows);
    swap_blocks<2>(rows);
    swap_blocks<1>(rows);
}

// Does one step of `lane_sums`: 2 * H rows become H, in which half of the lanes are of the other row.
template <int H> static inline void fold_rows(Vec* rows) {
    IntVec low, high;
    for (int lane = 0; lane < LANES; ++lane) {
        low[lane] = (lane & H) ? LANES + lane - H : lane;
        high[lane] = (lane & H) ? LANES + lane : lane + H;
    }
    for (int i = 0; i < H; ++i)
        rows[i] = __builtin_shuffle(rows[i], rows[i + H], low) + __builtin_shuffle(rows[i], rows[i + H], high);
}

// Returns in lane i the sum of all lanes of rows[i]; overwrites the rows.
static inline Vec lane_sums(Vec* rows) {
    if constexpr (LANES == 16) fold_rows<8>(rows);
    if constexpr (LANES >= 8) fold_rows<4>(rows);
    fold_rows<2>(rows);
    fold_rows<1>(rows);
    return rows[0];
}

template <int H> static inline Vec highest_folded(Vec x) {
    IntVec other;
    for (int lane = 0; lane < LANES; ++lane) other[lane] = lane ^ H;
    return larger(x, __builtin_shuffle(x, other));
}

// Returns in each lane the sum over its group of `unit` lanes, a power of two.
static inline Vec grouped_sum(Vec x, int unit) {
    for (int half = 1; half < unit; half *= 2) {
        IntVec other;
        for (int lane = 0; lane < LANES; ++lane) other[lane] = lane ^ half;
        x += __builtin_shuffle(x, other);
    }
    return x;
}

// Returns the largest lane.
static inline float highest(Vec x) {
    if constexpr (LANES == 16) x = highest_folded<8>(x);
    if constexpr (LANES >= 8) x = highest_folded<4>(x);
    x = highest_folded<2>(x);
    return highest_folded<1>(x)[0];
}
