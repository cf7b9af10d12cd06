// The dense parts of a decoder layer for a few tokens: norms, products with the weights where they lie, rotation,
// gate. The weights are read once, at the rate of the memory; sums are in float32, and a token's result does not
// depend on the other tokens of the pass.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "bf16_dots.h"
#include "direct.h"
#include "vectors.h"
#include "widened.h"

constexpr int OUTPUTS = 32;  // of a product that a thread computes at a time

// Rows of weights [outs][ins], `stride` entries apart, and a bias [outs] or null (`_Matrix` in dense.py).
template <typename T> struct Matrix {
    const T *weight, *bias;
    int64_t outs, ins, stride;
};

// The weight of an RMS norm, or null for no norm (`_Norm`).
template <typename T> struct Norm {
    const T* weight;
    float epsilon;
};

// The weights of a decoder layer (`_Layer`); head_norms are of each head's queries and keys.
template <typename T> struct Layer {
    Norm<T> attention_norm, mlp_norm, query_norm, key_norm;
    Matrix<T> query, key, value, output, gate, up, down;
    int64_t head_dim;
};

// A call for `rows` tokens (`_LayerCall`). Contiguous: `hidden`, `result` [rows][hidden], `cosines`, `sines`
// [rows][head_dim], `queries`, `keys`, `values` [heads][rows][head_dim], `scratch` of the caller.
template <typename T> struct LayerCall {
    const Layer<T>* layer;
    int64_t rows, threads;
    const T *hidden, *cosines, *sines;
    T *queries, *keys, *values;
    const T* attended;
    int64_t head_stride, row_stride;  // of `attended`, [heads][rows][head_dim]
    T *result, *scratch;
};

// A product of `rows` inputs with a matrix behind a norm (`_ProductCall`); `result` [rows][outs].
template <typename T> struct ProductCall {
    Norm<T> norm;
    Matrix<T> matrix;
    int64_t rows, threads, input_stride;
    const T* input;
    T *result, *scratch;
};

#ifdef OFFLOAD_RT_BF16_DOTS
template <typename T>
using ProductsOf = std::conditional_t<std::is_same_v<T, BFloat16>, Bf16DotProducts, WidenedProducts<T>>;
#else
template <typename T> using ProductsOf = WidenedProducts<T>;
#endif

// Rows of inputs as the queries of `score_keys`, whose keys are the rows of a matrix.
template <typename T> struct Inputs {
    using Products = ProductsOf<T>;
    using Row = typename Products::Row;
    static constexpr int STEP = Products::STEP;
    const T* data;
    int64_t stride;
    Row query(int r, int d) const { return row(data + r * stride + d); }
    static Row row(const T* p) { return Products::row(p); }
    static Vec add_product(Vec sums, Row x, Row y) { return Products::add_product(sums, x, y); }
};

// Computes outputs first .. first + count of R inputs from `row` on, to out [R][OUTPUTS].
template <int R, typename T>
OWN_REGISTERS static void multiply_rows(const Inputs<T>& inputs, int row, const Matrix<T>& m, int64_t first, int count, bool ahead,
                                        float* out) {
    constexpr int KEYS = LANES / R;
    const int dim = int(m.ins);
    for (int k = 0; k < count; k += KEYS) {
        const T* weights = m.weight + (first + k) * m.stride;
        const int left = count - k;
        Vec found = left < KEYS ? score_keys<R, false>(inputs, row, weights, m.stride, left, dim)
                    : ahead     ? score_keys<R, true, true>(inputs, row, weights, m.stride, KEYS, dim)
                                : score_keys<R, true>(inputs, row, weights, m.stride, KEYS, dim);
        for (int r = 0; r < R; ++r)
            std::memcpy(out + r * OUTPUTS + k, reinterpret_cast<float*>(&found) + r * KEYS, KEYS * sizeof(float));
    }
}

// Computes outputs first .. first + count, at most OUTPUTS, of `rows` inputs, to out [rows][OUTPUTS].
template <typename T>
static void multiply(const Inputs<T>& inputs, int rows, const Matrix<T>& m, int64_t first, int count, float* out) {
    if (rows < 4) {
        int r = 0;
        if (rows >= 2) multiply_rows<2>(inputs, 0, m, first, count, true, out), r = 2;
        if (r < rows) multiply_rows<1>(inputs, r, m, first, count, r == 0, out + r * OUTPUTS);
    } else {
        // A few rows of weights at a time, which stay in the first cache for all inputs.
        constexpr int KEYS = LANES / 4;
        for (int k = 0; k < count; k += KEYS) {
            const int some = std::min(KEYS, count - k);
            for (int r = 0; r + 4 <= rows; r += 4) multiply_rows<4>(inputs, r, m, first + k, some, r == 0, out + r * OUTPUTS + k);
        }
        int r = rows / 4 * 4;
        if (r + 2 <= rows) multiply_rows<2>(inputs, r, m, first, count, false, out + r * OUTPUTS), r += 2;
        if (r < rows) multiply_rows<1>(inputs, r, m, first, count, false, out + r * OUTPUTS);
    }
    if (!m.bias) return;
    for (int r = 0; r < rows; ++r)
        for (int k = 0; k < count; ++k) out[r * OUTPUTS + k] += widen(m.bias[first + k]);
}

// Divides a row by its root mean square, and multiplies by the weight of the norm; rounds between, as transformers.
template <typename From, typename T> static void normalize(const Norm<T>& norm, const From* from, int64_t dim, T* to) {
    double squares = 0.0;
    for (int64_t start = 0; start < dim; start += 512) {
        float part = 0.0f;
        for (int64_t d = start; d < std::min(start + 512, dim); ++d) part += widen(from[d]) * widen(from[d]);
        squares += part;
    }
    const float factor = 1.0f / std::sqrt(float(squares / double(dim)) + norm.epsilon);
    for (int64_t d = 0; d < dim; ++d) {
        T rounded;
        narrow(widen(from[d]) * factor, &rounded);
        narrow(widen(rounded) * widen(norm.weight[d]), to + d);
    }
}

// Norms and rotates heads of queries or keys [rows][dim], of which each thread has one at a time.
template <typename T>
static void store_head(const LayerCall<T>& call, const Norm<T>& norm, bool rotated, const float* head, float* scratch, T* to) {
    const int64_t dim = call.layer->head_dim, half = dim / 2;
    for (int64_t r = 0; r < call.rows; ++r) {
        const float* x = head + r * dim;
        if (norm.weight) {
            normalize(norm, x, dim, to + r * dim);
            for (int64_t d = 0; d < dim; ++d) scratch[d] = widen(to[r * dim + d]);
            x = scratch;
        }
        for (int64_t d = 0; d < dim; ++d) {
            const float other = d < half ? -x[d + half] : x[d - half];
            const float turned = rotated ? x[d] * widen(call.cosines[r * dim + d]) + other * widen(call.sines[r * dim + d]) : x[d];
            narrow(turned, to + r * dim + d);
        }
    }
}

// Computes queries, keys and values of a layer. `scratch` [rows][hidden].
template <typename T> static void attention_inputs(const LayerCall<T>& call) {
    const Layer<T>& layer = *call.layer;
    const int64_t rows = call.rows, dim = layer.head_dim, hidden = layer.query.ins;
    const int64_t heads = layer.query.outs / dim, kv_heads = layer.key.outs / dim;
#pragma omp parallel num_threads(int(call.threads)) if (call.threads > 1)
    {
        Buffer<float> out(size_t(rows) * OUTPUTS), head(size_t(rows) * dim), normed(dim);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) normalize(layer.attention_norm, call.hidden + r * hidden, hidden, call.scratch + r * hidden);
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < heads + 2 * kv_heads; ++number) {
            const bool queries = number < heads, keys = !queries && number < heads + kv_heads;
            const int64_t at = queries ? number : (number - heads) % kv_heads;
            const Matrix<T>& matrix = queries ? layer.query : keys ? layer.key : layer.value;
            for (int64_t d = 0; d < dim; d += OUTPUTS) {
                const int count = int(std::min<int64_t>(OUTPUTS, dim - d));
                multiply(Inputs<T>{call.scratch, hidden}, int(rows), matrix, at * dim + d, count, &out[0]);
                for (int64_t r = 0; r < rows; ++r) std::copy_n(&out[r * OUTPUTS], count, &head[r * dim + d]);
            }
            T* to = queries ? call.queries : keys ? call.keys : call.values;
            const Norm<T> norm = queries ? layer.query_norm : keys ? layer.key_norm : Norm<T>{};
            store_head(call, norm, queries || keys, &head[0], &normed[0], to + at * rows * dim);
        }
    }
}

static inline Vec sigmoid_times(Vec x) {
    const Vec power = exp2_nonpositive(larger(x, -x) * -LOG2E);
    return x * (x > 0 ? splat(1.0f) : power) / (power + 1.0f);
}

// Adds to a residual [rows][outs] the product of inputs [rows][ins] with a matrix. Called by all threads of a team.
template <typename T>
static void add_product(const T* inputs, const Matrix<T>& matrix, int64_t rows, const T* residual, T* result, float* out) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < matrix.outs; first += OUTPUTS) {
        const int count = int(std::min<int64_t>(OUTPUTS, matrix.outs - first));
        multiply(Inputs<T>{inputs, matrix.ins}, int(rows), matrix, first, count, out);
        for (int64_t r = 0; r < rows; ++r)
            for (int k = 0; k < count; ++k) {
                const int64_t at = r * matrix.outs + first + k;
                T rounded;
                narrow(out[r * OUTPUTS + k], &rounded);
                narrow(widen(residual[at]) + widen(rounded), result + at);
            }
    }
}

// Computes what follows attention in a layer. `scratch` [rows][heads * head_dim + 2 * hidden + intermediate].
template <typename T> static void after_attention(const LayerCall<T>& call) {
    const Layer<T>& layer = *call.layer;
    const int64_t rows = call.rows, dim = layer.head_dim, hidden = layer.query.ins, wide = layer.gate.outs;
    T* attended = call.scratch;
    T* summed = attended + rows * layer.output.ins;
    T* normed = summed + rows * hidden;
    T* gated = normed + rows * hidden;
#pragma omp parallel num_threads(int(call.threads)) if (call.threads > 1)
    {
        Buffer<float> out(size_t(rows) * OUTPUTS), up(size_t(rows) * OUTPUTS);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t h = 0; h < layer.output.ins / dim; ++h)
                std::memcpy(attended + r * layer.output.ins + h * dim, call.attended + h * call.head_stride + r * call.row_stride,
                            dim * sizeof(T));
        add_product(attended, layer.output, rows, call.hidden, summed, &out[0]);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) normalize(layer.mlp_norm, summed + r * hidden, hidden, normed + r * hidden);
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < wide; first += OUTPUTS) {
            const int count = int(std::min<int64_t>(OUTPUTS, wide - first));
            multiply(Inputs<T>{normed, hidden}, int(rows), layer.gate, first, count, &out[0]);
            multiply(Inputs<T>{normed, hidden}, int(rows), layer.up, first, count, &up[0]);
            for (int64_t r = 0; r < rows; ++r) {
                for (int k = 0; k < OUTPUTS; k += LANES)
                    store(&out[r * OUTPUTS + k], sigmoid_times(load(&out[r * OUTPUTS + k])) * load(&up[r * OUTPUTS + k]));
                for (int k = 0; k < count; ++k) narrow(out[r * OUTPUTS + k], gated + r * wide + first + k);
            }
        }
        add_product(gated, layer.down, rows, summed, call.result, &out[0]);
    }
}

// Computes a product behind a norm. `scratch` [rows][ins] if there is one.
template <typename T> static void product(const ProductCall<T>& call) {
    const Matrix<T>& matrix = call.matrix;
    const T* inputs = call.norm.weight ? call.scratch : call.input;
    const int64_t stride = call.norm.weight ? matrix.ins : call.input_stride;
#pragma omp parallel num_threads(int(call.threads)) if (call.threads > 1)
    {
        Buffer<float> out(size_t(call.rows) * OUTPUTS);
        if (call.norm.weight) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < call.rows; ++r)
                normalize(call.norm, call.input + r * call.input_stride, matrix.ins, call.scratch + r * matrix.ins);
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t first = 0; first < matrix.outs; first += OUTPUTS) {
            const int count = int(std::min<int64_t>(OUTPUTS, matrix.outs - first));
            multiply(Inputs<T>{inputs, stride}, int(call.rows), matrix, first, count, &out[0]);
            for (int64_t r = 0; r < call.rows; ++r)
                for (int k = 0; k < count; ++k) narrow(out[r * OUTPUTS + k], call.result + r * matrix.outs + first + k);
        }
    }
}

extern "C" {

void offload_rt_attention_inputs_float32(const LayerCall<float>* call) { attention_inputs(*call); }
void offload_rt_attention_inputs_bfloat16(const LayerCall<BFloat16>* call) { attention_inputs(*call); }
void offload_rt_after_attention_float32(const LayerCall<float>* call) { after_attention(*call); }
void offload_rt_after_attention_bfloat16(const LayerCall<BFloat16>* call) { after_attention(*call); }
void offload_rt_product_float32(const ProductCall<float>* call) { product(*call); }
void offload_rt_product_bfloat16(const ProductCall<BFloat16>* call) { product(*call); }

// Entries that the width of a product's inputs must be a multiple of.
int64_t offload_rt_product_step_float32() { return Inputs<float>::STEP; }
int64_t offload_rt_product_step_bfloat16() { return Inputs<BFloat16>::STEP; }
}
