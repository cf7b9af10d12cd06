// The dense parts of a decoder layer: norms, products, rotation, gate. A token's result does not
// depend on the other tokens of the pass.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "products.h"
#include "vectors.h"

// The weight of an RMS norm, or null for no norm (`_Norm`).
template <typename T> struct Norm {
    const T* weight;
    float epsilon;
};

// The weights of a decoder layer (`_Layer`); head_norms are of each head's queries and keys.
template <typename T> struct Layer {
    Norm<T> attention_norm, mlp_norm, query_norm, key_norm;
    Matrix<T> query, key, value, output, gate, up, down;
    int64_t head_dim, tiled;  // by tiles where there are some
};

// A call for `rows` tokens (`_LayerCall`), by draft planes alone where there are planes and `draft` is set. Contiguous:
// `hidden` [rows][query.ins] in front of attention and [rows][output.outs] behind it, `result` [rows][output.outs],
// `cosines`, `sines` [rows][head_dim], `queries`, `keys`, `values` [heads][rows][head_dim].
template <typename T> struct LayerCall {
    const Layer<T>* layer;
    int64_t rows, threads, draft;
    const T *hidden, *cosines, *sines;
    T *queries, *keys, *values;
    const T* attended;
    int64_t head_stride, row_stride;  // of `attended`, [heads][rows][head_dim]
    T* result;
};

// A product of `rows` inputs with a matrix behind a norm (`_ProductCall`); `result` [rows][outs].
template <typename T> struct ProductCall {
    Norm<T> norm;
    Matrix<T> matrix;
    int64_t rows, threads, draft, input_stride, tiled;
    const T* input;
    T* result;
};

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

// Sets inputs to the norm of rows `stride` entries apart, or to the rows where there is none. Called by all threads
// of a team, each with a `row` of its own.
template <typename T> static void set_inputs(const Norm<T>& norm, const T* from, int64_t stride, const Inputs<T>& inputs, T* row) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < inputs.rows; ++r) {
        if (norm.weight) normalize(norm, from + r * stride, inputs.width, row);
        inputs.set(r, 0, norm.weight ? row : from + r * stride, inputs.width);
    }
}

// Norms and rotates heads of queries or keys [rows][dim], of which each thread has one at a time, to `to` [rows][dim].
template <typename T>
static void store_head(const LayerCall<T>& call, int64_t first, int64_t rows, const Norm<T>& norm, bool rotated, const float* head,
                       float* scratch, T* to) {
    const int64_t dim = call.layer->head_dim, half = dim / 2;
    const T *cosines = call.cosines + first * dim, *sines = call.sines + first * dim;
    for (int64_t r = 0; r < rows; ++r) {
        const float* x = head + r * dim;
        if (norm.weight) {
            normalize(norm, x, dim, to + r * dim);
            for (int64_t d = 0; d < dim; ++d) scratch[d] = widen(to[r * dim + d]);
            x = scratch;
        }
        for (int64_t d = 0; d < dim; ++d) {
            const float other = d < half ? -x[d + half] : x[d - half];
            const float turned = rotated ? x[d] * widen(cosines[r * dim + d]) + other * widen(sines[r * dim + d]) : x[d];
            narrow(turned, to + r * dim + d);
        }
    }
}

// Computes queries, keys and values of a layer for tokens first .. first + rows.
template <typename T> static void attention_inputs(const LayerCall<T>& call, int64_t first, int64_t rows) {
    const Layer<T>& layer = *call.layer;
    const int64_t dim = layer.head_dim, hidden = layer.query.ins;
    const int64_t heads = layer.query.outs / dim, kv_heads = layer.key.outs / dim;
    Buffer<T> memory(rows * hidden);
    const Inputs<T> inputs{&memory[0], rows, hidden, layer.tiled && has_tiles<T>()};
#pragma omp parallel num_threads(int(call.threads)) if (call.threads > 1)
    {
        Buffer<float> out(size_t(rows) * OUTPUTS), head(size_t(rows) * dim), normed(dim);
        Buffer<T> row(hidden);
        Multiplier<T> multiply(call.draft);
        set_inputs(layer.attention_norm, call.hidden + first * hidden, hidden, inputs, &row[0]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < heads + 2 * kv_heads; ++number) {
            const bool queries = number < heads, keys = !queries && number < heads + kv_heads;
            const int64_t at = queries ? number : (number - heads) % kv_heads;
            const Matrix<T>& matrix = queries ? layer.query : keys ? layer.key : layer.value;
            for (int64_t d = 0; d < dim; d += OUTPUTS) {
                const int count = int(std::min<int64_t>(OUTPUTS, dim - d));
                multiply(inputs, matrix, at * dim + d, count, &out[0]);
                for (int64_t r = 0; r < rows; ++r) std::copy_n(&out[r * OUTPUTS], count, &head[r * dim + d]);
            }
            T* to = queries ? call.queries : keys ? call.keys : call.values;
            const Norm<T> norm = queries ? layer.query_norm : keys ? layer.key_norm : Norm<T>{};
            store_head(call, first, rows, norm, queries || keys, &head[0], &normed[0], to + (at * call.rows + first) * dim);
        }
    }
}

static inline Vec sigmoid_times(Vec x) {
    const Vec power = exp2_nonpositive(larger(x, -x) * -LOG2E);
    return x * (x > 0 ? splat(1.0f) : power) / (power + 1.0f);
}

// Adds to a residual [rows][outs] the product of inputs with a matrix. Called by all threads of a team.
template <typename T>
static void add_product(Multiplier<T>& multiply, const Inputs<T>& inputs, const Matrix<T>& matrix, const T* residual, T* result,
                        float* out) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < matrix.outs; first += OUTPUTS) {
        const int count = int(std::min<int64_t>(OUTPUTS, matrix.outs - first));
        multiply(inputs, matrix, first, count, out);
        for (int64_t r = 0; r < inputs.rows; ++r)
            for (int k = 0; k < count; ++k) {
                const int64_t at = r * matrix.outs + first + k;
                T rounded;
                narrow(out[r * OUTPUTS + k], &rounded);
                narrow(widen(residual[at]) + widen(rounded), result + at);
            }
    }
}

// Computes what follows attention in a layer for tokens first .. first + rows.
template <typename T> static void after_attention(const LayerCall<T>& call, int64_t first, int64_t rows) {
    const Layer<T>& layer = *call.layer;
    const int64_t dim = layer.head_dim, hidden = layer.output.outs, wide = layer.gate.outs;
    Buffer<T> memory(rows * (layer.output.ins + 2 * hidden + wide));
    const bool tiled = layer.tiled && has_tiles<T>();
    const Inputs<T> attended{&memory[0], rows, layer.output.ins, tiled};
    T* summed = attended.data + rows * attended.width;
    const Inputs<T> normed{summed + rows * hidden, rows, hidden, tiled}, gated{normed.data + rows * hidden, rows, wide, tiled};
    const T *from = call.attended + first * call.row_stride, *residual = call.hidden + first * hidden;
#pragma omp parallel num_threads(int(call.threads)) if (call.threads > 1)
    {
        Buffer<float> out(size_t(rows) * OUTPUTS), up(size_t(rows) * OUTPUTS);
        Buffer<T> row(std::max<int64_t>(hidden, OUTPUTS));
        Multiplier<T> multiply(call.draft);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t h = 0; h < layer.output.ins / dim; ++h)
                attended.set(r, h * dim, from + h * call.head_stride + r * call.row_stride, dim);
        add_product(multiply, attended, layer.output, residual, summed, &out[0]);
        set_inputs(layer.mlp_norm, summed, hidden, normed, &row[0]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t output = 0; output < wide; output += OUTPUTS) {
            const int count = int(std::min<int64_t>(OUTPUTS, wide - output));
            multiply(normed, layer.gate, output, count, &out[0]);
            multiply(normed, layer.up, output, count, &up[0]);
            for (int64_t r = 0; r < rows; ++r) {
                for (int k = 0; k < OUTPUTS; k += LANES)
                    store(&out[r * OUTPUTS + k], sigmoid_times(load(&out[r * OUTPUTS + k])) * load(&up[r * OUTPUTS + k]));
                for (int k = 0; k < count; ++k) narrow(out[r * OUTPUTS + k], &row[k]);
                gated.set(r, output, &row[0], count);
            }
        }
        add_product(multiply, gated, layer.down, summed, call.result + first * hidden, &out[0]);
    }
}

// Computes a product behind a norm for rows first .. first + rows.
template <typename T> static void product(const ProductCall<T>& call, int64_t first, int64_t rows) {
    const Matrix<T>& matrix = call.matrix;
    Buffer<T> memory(rows * matrix.ins);
    const Inputs<T> inputs{&memory[0], rows, matrix.ins, call.tiled && has_tiles<T>()};
    T* result = call.result + first * matrix.outs;
#pragma omp parallel num_threads(int(call.threads)) if (call.threads > 1)
    {
        Buffer<float> out(size_t(rows) * OUTPUTS);
        Buffer<T> row(matrix.ins);
        Multiplier<T> multiply(call.draft);
        set_inputs(call.norm, call.input + first * call.input_stride, call.input_stride, inputs, &row[0]);
#pragma omp for schedule(dynamic, 4)
        for (int64_t output = 0; output < matrix.outs; output += OUTPUTS) {
            const int count = int(std::min<int64_t>(OUTPUTS, matrix.outs - output));
            multiply(inputs, matrix, output, count, &out[0]);
            for (int64_t r = 0; r < rows; ++r)
                for (int k = 0; k < count; ++k) narrow(out[r * OUTPUTS + k], result + r * matrix.outs + output + k);
        }
    }
}

// Computes a call for some of its rows at a time.
template <typename Call> static void in_portions(const Call& call, void (*compute)(const Call&, int64_t, int64_t)) {
    for (int64_t first = 0; first < call.rows; first += MOST_ROWS) compute(call, first, std::min(MOST_ROWS, call.rows - first));
}

extern "C" {

void offload_rt_attention_inputs_float32(const LayerCall<float>* call) { in_portions(*call, attention_inputs); }
void offload_rt_attention_inputs_bfloat16(const LayerCall<BFloat16>* call) { in_portions(*call, attention_inputs); }
void offload_rt_after_attention_float32(const LayerCall<float>* call) { in_portions(*call, after_attention); }
void offload_rt_after_attention_bfloat16(const LayerCall<BFloat16>* call) { in_portions(*call, after_attention); }
void offload_rt_product_float32(const ProductCall<float>* call) { in_portions(*call, product); }
void offload_rt_product_bfloat16(const ProductCall<BFloat16>* call) { in_portions(*call, product); }

// Entries that the width of a product's inputs must be a multiple of.
int64_t offload_rt_product_step_float32() { return Inputs<float>::STEP; }
int64_t offload_rt_product_step_bfloat16() { return Inputs<BFloat16>::STEP; }
}
