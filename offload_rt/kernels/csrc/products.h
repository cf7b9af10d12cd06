// Products of inputs with the weights where they lie. The weights are read once for each MOST_ROWS inputs, at the rate of
// the memory; sums are in float32, and a row of the result does not depend on the other rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "bf16_dots.h"
#include "direct.h"
#include "planes.h"
#include "tiles.h"
#include "vectors.h"
#include "widened.h"

constexpr int OUTPUTS = 32;         // of a product that a thread computes at a time
constexpr int64_t MOST_ROWS = 256;  // of inputs at a time, so that they stay in the second cache

// Rows of weights [outs][ins], `stride` entries apart, and a bias [outs] or null (`_Matrix` in dense.py). Where there are
// planes, the weights are in these.
template <typename T> struct Matrix {
    const T *weight, *bias;
    int64_t outs, ins, stride;
    const Planes* planes;
};

#ifdef OFFLOAD_RT_BF16_DOTS
template <typename T>
using ProductsOf = std::conditional_t<std::is_same_v<T, BFloat16>, Bf16DotProducts, WidenedProducts<T>>;
#else
template <typename T> using ProductsOf = WidenedProducts<T>;
#endif

// Whether there are tiles for such entries.
template <typename T> static inline bool has_tiles() {
#ifdef OFFLOAD_RT_BF16_TILES
    return std::is_same_v<T, BFloat16> && TILES_GRANTED;
#else
    return false;
#endif
}

// Inputs [rows][width] of products, laid out as these read them: one row after the other, or for tiles [width / 2][16]
// pairs of each 16 rows (`tiled`). They are also the queries of `score_keys`, whose keys are the rows of a matrix.
template <typename T> struct Inputs {
    using Products = ProductsOf<T>;
    using Row = typename Products::Row;
    static constexpr int STEP = Products::STEP;
    T* data;
    int64_t rows, width;
    bool tiled;

    // Sets `count` entries of a row from `first` on, both even.
    void set(int64_t row, int64_t first, const T* from, int64_t count) const {
#ifdef OFFLOAD_RT_BF16_TILES
        if (tiled) {
            const int64_t start = row / TILE_ROWS * TILE_ROWS, tall = std::min<int64_t>(rows - start, TILE_ROWS);
            T* to = data + start * width + first * tall + (row - start) * 2;
            for (int64_t d = 0; d < count; d += 2) std::memcpy(to + d * tall, from + d, 2 * sizeof(T));
            return;
        }
#endif
        std::memcpy(data + row * width + first, from, count * sizeof(T));
    }

    Row query(int r, int d) const { return row(data + r * width + d); }
    static Row row(const T* p) { return Products::row(p); }
    static Vec add_product(Vec sums, Row x, Row y) { return Products::add_product(sums, x, y); }
};

// Rows of weights as they lie.
template <typename T> struct PlainRows {
    using Products = ProductsOf<T>;
    const T* at;
    int64_t stride;

    typename Products::Row operator()(int k, int d) const { return Products::row(at + k * stride + d); }
    void prefetch(int k, int d) const { __builtin_prefetch(at + k * stride + d, 0, 2); }
};

template <typename T> struct PlainWeights {
    static constexpr int MOST = LANES;
    const T* at;
    int64_t stride;

    PlainRows<T> rows(int first, int) const { return {at + first * stride, stride}; }
};

// Rows of planes, expanded in registers.
template <bool Draft> struct PlaneWeights {
    using Products = ProductsOf<BFloat16>;
    using Word = std::conditional_t<sizeof(typename Products::Row) == 2 * Products::STEP, int16_t, int32_t>;
    using Rows = PlaneRows<Draft, Word, Products::STEP>;
    static constexpr int MOST = LANES / 2;
    const Planes& planes;
    int64_t first, ins;

    Rows rows(int row, int count) const { return Rows(planes, first + row, count, ins); }
};

// Computes `count` outputs of R inputs from `row` on, to out [R][OUTPUTS].
template <int R, typename T, typename Weights>
OWN_REGISTERS static void multiply_rows(const Inputs<T>& inputs, int row, const Weights& weights, int count, bool ahead, float* out) {
    constexpr int KEYS = std::min(LANES / R, Weights::MOST);
    const int dim = int(inputs.width);
    for (int k = 0; k < count; k += KEYS) {
        const int some = std::min(KEYS, count - k);
        auto keys = weights.rows(k, some);
        Vec found = some < KEYS ? score_keys<R, KEYS, false, false>(inputs, row, keys, some, dim)
                    : ahead     ? score_keys<R, KEYS, true, true>(inputs, row, keys, KEYS, dim)
                                : score_keys<R, KEYS, true, false>(inputs, row, keys, KEYS, dim);
        for (int r = 0; r < R; ++r)
            std::memcpy(out + r * OUTPUTS + k, reinterpret_cast<float*>(&found) + r * KEYS, KEYS * sizeof(float));
    }
}

constexpr int FEW = 4;  // inputs, for fewer of which rows of weights are read once or twice

// Computes `count` outputs, at most OUTPUTS, of fewer than FEW inputs, to out [rows][OUTPUTS], by vectors.
template <typename T, typename Weights>
static void multiply_few(const Inputs<T>& inputs, const Weights& weights, int count, float* out) {
    const int rows = int(inputs.rows);
    int r = 0;
    if (rows >= 2) multiply_rows<2>(inputs, 0, weights, count, true, out), r = 2;
    if (r < rows) multiply_rows<1>(inputs, r, weights, count, r == 0, out + r * OUTPUTS);
}

// Does the same for FEW inputs or more.
template <typename T> static void multiply_many(const Inputs<T>& inputs, const PlainWeights<T>& weights, int count, float* out) {
    const int rows = int(inputs.rows);
    // A few rows of weights at a time, which stay in the first cache for all inputs.
    constexpr int KEYS = LANES / FEW;
    for (int k = 0; k < count; k += KEYS) {
        const int some = std::min(KEYS, count - k);
        const PlainWeights<T> few{weights.at + k * weights.stride, weights.stride};
        for (int r = 0; r + FEW <= rows; r += FEW) multiply_rows<FEW>(inputs, r, few, some, r == 0, out + r * OUTPUTS + k);
    }
    int r = rows / FEW * FEW;
    if (r + 2 <= rows) multiply_rows<2>(inputs, r, weights, count, false, out + r * OUTPUTS), r += 2;
    if (r < rows) multiply_rows<1>(inputs, r, weights, count, false, out + r * OUTPUTS);
}

// What a thread multiplies with; `draft`: by the draft planes alone, where there are planes.
template <typename T> class Multiplier {
  public:
    explicit Multiplier(bool draft) : draft_(draft) {}

    // Computes outputs first .. first + count, at most OUTPUTS, of all inputs, to out [rows][OUTPUTS].
    void operator()(const Inputs<T>& inputs, const Matrix<T>& m, int64_t first, int count, float* out) {
        if (!m.planes)
            multiply_plain(inputs, {m.weight + first * m.stride, m.stride}, count, out);
        else if constexpr (std::is_same_v<T, BFloat16>)
            draft_ ? multiply_planes<true>(inputs, m, first, count, out) : multiply_planes<false>(inputs, m, first, count, out);
        if (!m.bias) return;
        for (int64_t r = 0; r < inputs.rows; ++r)
            for (int k = 0; k < count; ++k) out[r * OUTPUTS + k] += widen(m.bias[first + k]);
    }

  private:
    // Some rows of planes at a time, which stay in the second cache as they are expanded.
    static constexpr int EXPANDED = 16;
    static_assert(EXPANDED % LANES == 0 && OUTPUTS % EXPANDED == 0);

    template <bool Draft> void multiply_planes(const Inputs<T>& inputs, const Matrix<T>& m, int64_t first, int count, float* out) {
        if (!inputs.tiled && inputs.rows < FEW) return multiply_few(inputs, PlaneWeights<Draft>{*m.planes, first, m.ins}, count, out);
        if (width_ < m.ins) weights_.emplace(size_t(EXPANDED * m.ins)), width_ = m.ins;
        T* weights = &(*weights_)[0];
        for (int k = 0; k < count; k += EXPANDED) {
            const int some = std::min(EXPANDED, count - k);
            expand_rows<Draft>(*m.planes, first + k, some, m.ins, weights);
            multiply_plain(inputs, {weights, m.ins}, some, out + k);
        }
    }

    void multiply_plain(const Inputs<T>& inputs, const PlainWeights<T>& weights, int count, float* out) {
#ifdef OFFLOAD_RT_BF16_TILES
        if constexpr (std::is_same_v<T, BFloat16>)
            if (inputs.tiled)
                return tiles_.multiply(weights.at, weights.stride, count, inputs.data, int(inputs.rows), inputs.width, out, OUTPUTS);
#endif
        inputs.rows < FEW ? multiply_few(inputs, weights, count, out) : multiply_many(inputs, weights, count, out);
    }

#ifdef OFFLOAD_RT_BF16_TILES
    Tiles tiles_;
#endif
    bool draft_;
    std::optional<Buffer<T>> weights_;  // [EXPANDED][width_], of planes
    int64_t width_ = 0;
};
