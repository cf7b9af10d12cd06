// Attention of many queries over keys and values in place in CPU memory, with log-sum-exp.
//
// torch's flash kernel for CPUs is bound by arithmetic from a few queries on. Here a block of keys is
// transposed in registers once for all queries, so that the lanes of a vector are keys for the scores and
// dimensions for the sums, and nothing is reduced across lanes. The matrix products are in widened.h
// (float32, any processor) and bf16_dots.h; this file has the softmax between them and splits the work among
// threads.
//
// Calls share no state: several threads may call at the same time, each with a team of its own.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "bf16_dots.h"
#include "block.h"
#include "layer.h"
#include "packed.h"
#include "pages.h"
#include "quantized.h"
#include "vectors.h"
#include "widened.h"

constexpr float LN2 = 0.6931471805599453f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float MAX_EXPONENT = 80.0f;  // of a mass, as in kernels/operators.py

// Working memory of one thread for `rows` queries: scores and weights of a block of tokens, and the sums over
// all blocks so far.
template <typename Products> struct Scratch {
    using Weight = typename Products::Weight;
    Products products;
    Buffer<float> scores, sums, peak, denominator;
    Buffer<Weight> weights;
    Buffer<typename Products::Entry> entries;  // a block that was decoded
    Scratch(int dim, int rows)
        : products(dim, rows), scores(size_t(rows) * BLOCK), sums(size_t(rows) * dim), peak(rows),
          denominator(size_t(rows) * LANES), weights(size_t(rows) * BLOCK),
          entries(size_t(BLOCK) * dim) {}

    // The softmax denominator of a query; until here it is a sum per lane.
    float denominator_of(int row) const {
        float total = 0.0f;
        for (int lane = 0; lane < LANES; ++lane) total += denominator[row * LANES + lane];
        return total;
    }
};

// Attention mass of one query: its weights summed over each chunk of `size` tokens, of which `filled` chunks
// are done. Not taken if `memory` is null.
struct ChunkMass {
    float* memory;
    int64_t filled, size;
};

// Masks the scores of one query over a block, and rescales the sums so far to the new peak.
template <typename Products>
static inline void raise_peak(Scratch<Products>& s, int scored, int r, int block_tokens, int dim, const float* mask,
                              const ChunkMass& mass) {
    float* row = &s.scores[scored * BLOCK];
    if (mask)
        for (int k = 0; k < block_tokens; ++k) row[k] += mask[k] * LOG2E;
    for (int k = block_tokens; k % LANES; ++k) row[k] = -INFINITE;
    Vec top = load(row);
    for (int k = LANES; k < block_tokens; k += LANES) top = larger(top, load(row + k));
    float peak = highest(top);
    if (!(peak > s.peak[r])) return;
    float shrink = std::exp2(s.peak[r] - peak);
    store(&s.denominator[r * LANES], load(&s.denominator[r * LANES]) * shrink);
    for (int d = 0; d < dim; d += LANES) store(&s.sums[r * dim + d], load(&s.sums[r * dim + d]) * shrink);
    if (mass.memory)
        for (int64_t chunk = 0; chunk < mass.filled; ++chunk) mass.memory[chunk] *= shrink;
    s.peak[r] = peak;
}

// Turns the scores of one query over a block into weights relative to the peak.
template <typename Products>
static inline void softmax_weights(Scratch<Products>& s, int scored, int r, int block_tokens, const ChunkMass& mass) {
    const float* row = &s.scores[scored * BLOCK];
    auto* weights = &s.weights[scored * BLOCK];
    // If everything so far is masked or NaN, the weights must come out as 0 or NaN.
    float peak = s.peak[r] == -INFINITE ? 0.0f : s.peak[r];
    Vec denominator = load(&s.denominator[r * LANES]);
    float* sums = mass.memory ? mass.memory + mass.filled : nullptr;
    Vec chunk = {};
    for (int k = 0; k < block_tokens; k += LANES) {
        Vec weight = exp2_nonpositive(load(row + k) - peak);
        store(weights + k, weight);
        denominator += weight;
        if (!sums) continue;
        chunk += weight;
        if ((k + LANES) % mass.size && mass.size > LANES) continue;
        int size = int(std::min<int64_t>(mass.size, LANES));
        chunk = grouped_sum(chunk, size);
        for (int lane = 0; lane < LANES && k + lane < block_tokens; lane += size) *sums++ = chunk[lane];
        chunk = Vec{};
    }
    store(&s.denominator[r * LANES], denominator);
}

// The arguments of a call (`_Call` in native.py). Contiguous: `out` and `before` [heads, count, dim], `lse`,
// `lse_before` and `reference` [heads, count], `mask` [count, tokens] or null. `before` is attention over other tokens,
// to which this call's is added, or null. `mass` [heads, sampled, tokens / chunk] or null, whose rows are `mass_stride`
// apart, receives for each chunk the sum of exp(score - reference) of sampled queries; `reference` null: relative to
// the log-sum-exp of the result. A chunk is a power of two, at most BLOCK, and lies within a page. Of every `period`
// queries each `step`th one is sampled, counted back from the last. `Side` is how keys and values are stored.
template <typename Side> struct Call {
    using T = typename Side::Entry;
    Pages<T> queries;
    Side keys, values;
    float *out, *lse;
    const float *before, *lse_before, *mask;
    float* mass;
    const float* reference;
    int64_t heads, count, tokens, dim, threads, mass_stride, chunk, period, step;
    float scale;

    // The address of the mass of query `row`, counted over all heads, from `token` on; null if it is not sampled.
    float* chunk_mass_at(int64_t row, int64_t token) const {
        const int64_t before_last = period - 1 - row % period;
        if (!mass || before_last % step) return nullptr;
        const int64_t sampled = (period + step - 1) / step;
        const int64_t at = row / period * sampled + sampled - 1 - before_last / step;
        return mass + at * mass_stride + token / chunk;
    }

    // Stores one row of the result, from the undivided sums over all tokens, their peak and denominator. Returns the
    // factor by which the row's mass, relative to `peak`, has to be multiplied.
    float store_row(int64_t at, const float* sums, float peak, float denominator) const {
        const float found = (peak + std::log2(denominator)) * LN2;
        // A query that sees no key has the output zero and the log-sum-exp -inf, and so adds nothing.
        float share = denominator == 0.0f ? 0.0f : 1.0f / denominator, total = found;
        if (before) {
            const float top = std::max(found, lse_before[at]);
            float left = 1.0f, added = 0.0f;
            if (top != -INFINITE) {
                left = std::exp(lse_before[at] - top), added = std::exp(found - top);
                total = top + std::log(left + added);
                const float whole = left + added;
                left /= whole, added /= whole;
            }
            for (int d = 0; d < dim; ++d) out[at * dim + d] = left * before[at * dim + d] + added * share * sums[d];
        } else
            for (int d = 0; d < dim; ++d) out[at * dim + d] = share * sums[d];
        lse[at] = total;
        return share * std::exp(std::min(found - (reference ? reference[at] : total), MAX_EXPONENT));
    }

    // Multiplies the mass of a query on tokens first .. last.
    void scale_chunk_mass(int64_t row, int64_t first, int64_t last, float factor) const {
        if (float* from = chunk_mass_at(row, first))
            for (int64_t at = 0; at < (last - first) / chunk; ++at) from[at] *= factor;
    }
};

// The unit of work of a thread: queries row .. row + count of heads head .. head + heads, over the tokens
// first .. last.
struct Task {
    int64_t head, heads, row, count, first, last;
};

// Leaves the undivided sums, the peak score and the denominator of each query, head by head, in `s`.
//
// Goes page by page, and in a page head by head, so that memory is read in order. One head at a time (without
// `AllHeads`) is compiled separately, as its loops are faster.
template <bool AllHeads, typename Products, typename Side>
static void attend_task(const Call<Side>& call, const Task& task, Scratch<Products>& s) {
    const int heads = AllHeads ? int(task.heads) : 1;
    const int rows = int(heads * task.count), count = int(task.count), dim = int(call.dim);
    for (int64_t h = 0; h < heads; ++h)
        s.products.set_queries(int(h) * count, call.queries.at(task.head + h, task.row), call.queries.row_stride,
                               count, call.scale);
    std::fill_n(&s.sums[0], rows * dim, 0.0f);
    std::fill_n(&s.peak[0], rows, -INFINITE);
    std::fill_n(&s.denominator[0], rows * LANES, 0.0f);
    const int64_t page = call.keys.page_tokens;
    for (int64_t start = task.first, end; start < task.last; start = end) {
        end = std::min(task.last, start - start % page + page);
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t at = start, next; at < end; at = next) {
                next = std::min(end, at + BLOCK);
                const int block_tokens = int(next - at), base = AllHeads ? int(h) * count : 0;
                // The block to prefetch: the next one; at the end of a page the next head's first one, and after
                // the last head the first one of the next page.
                const int64_t head = task.head + h, heads_left = heads - h - 1;
                const int64_t then = next < end ? head : heads_left ? head + 1 : task.head;
                const int64_t from = next < end || !heads_left ? next : start;
                const auto keys = call.keys.block(head, at, block_tokens, &s.entries[0]);
                s.products.score(base, keys.data, call.keys.ahead(then, from), keys.stride, block_tokens, count, &s.scores[0]);
                // Two loops, so that independent peaks overlap and no weight waits for its peak.
                const auto mass = [&](int r) {
                    return ChunkMass{call.chunk_mass_at(head * call.count + task.row + r, task.first), (at - task.first) / call.chunk,
                                 call.chunk};
                };
                for (int r = 0; r < count; ++r)
                    raise_peak(s, r, base + r, block_tokens, dim,
                               call.mask ? call.mask + (task.row + r) * call.tokens + at : nullptr, mass(r));
                for (int r = 0; r < count; ++r) softmax_weights(s, r, base + r, block_tokens, mass(r));
                const auto values = call.values.block(head, at, block_tokens, &s.entries[0]);
                s.products.sum(&s.weights[0], values.data, call.values.ahead(then, from), values.stride, block_tokens,
                               count, &s.sums[base * dim]);
            }
    }
    s.products.finish(&s.sums[0], rows);
}

template <typename Products, typename Side> static void attend(const Call<Side>& call) {
    const int64_t rows = call.heads * call.count, dim = call.dim, most = call.tokens / 1024;
    // With few queries, all heads at once if that leaves every thread enough work.
    const bool all_heads = rows <= QUERY_TILE && call.keys.page_tokens < call.tokens && most >= 4 * call.threads;
    const int64_t heads = all_heads ? call.heads : 1, groups = call.heads / heads;
    const int64_t tiles = (call.count + QUERY_TILE - 1) / QUERY_TILE;
    // With few heads and queries, keys are split too, so that every thread has work.
    int64_t wanted = std::max<int64_t>(1, (4 * call.threads + groups * tiles - 1) / (groups * tiles));
    int64_t splits = std::clamp<int64_t>(most, 1, wanted);
    int64_t step = std::max<int64_t>(1, ((call.tokens + splits - 1) / splits + BLOCK - 1) / BLOCK) * BLOCK;
    splits = std::max<int64_t>(1, (call.tokens + step - 1) / step);
    std::vector<float> sums(splits > 1 ? splits * rows * dim : 0);
    std::vector<float> peaks(splits > 1 ? splits * rows : 0), denominators(peaks.size());
    const int64_t tasks = groups * tiles * splits;

#pragma omp parallel num_threads(int(call.threads)) if (tasks > 1)
    {
        Scratch<Products> s(int(call.dim), int(std::min<int64_t>(heads * call.count, QUERY_TILE)));
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < tasks; ++number) {
            int64_t split = number % splits, row = number / splits % tiles * QUERY_TILE;
            Task task{number / splits / tiles * heads, heads, row, std::min<int64_t>(QUERY_TILE, call.count - row),
                      split * step, std::min(call.tokens, (split + 1) * step)};
            all_heads ? attend_task<true>(call, task, s) : attend_task<false>(call, task, s);
            for (int r = 0; r < task.heads * task.count; ++r) {
                int64_t at = (task.head + r / task.count) * call.count + row + r % task.count;
                int64_t part = split * rows + at;
                if (splits > 1) {
                    std::copy_n(&s.sums[r * dim], dim, &sums[part * dim]);
                    peaks[part] = s.peak[r];
                    denominators[part] = s.denominator_of(r);
                } else {
                    const float factor = call.store_row(at, &s.sums[r * dim], s.peak[r], s.denominator_of(r));
                    call.scale_chunk_mass(at, 0, call.tokens, factor);
                }
            }
        }
    }
    if (splits == 1) return;
#pragma omp parallel for num_threads(int(call.threads)) if (call.mass)
    for (int64_t at = 0; at < rows; ++at) {
        std::vector<float> total(dim);
        float peak = -INFINITE, denominator = 0.0f;
        for (int64_t split = 0; split < splits; ++split) peak = std::max(peak, peaks[split * rows + at]);
        for (int64_t split = 0; split < splits; ++split) {
            int64_t part = split * rows + at;
            if (denominators[part] == 0.0f) continue;
            float weight = std::exp2(peaks[part] - peak);
            denominator += weight * denominators[part];
            for (int64_t d = 0; d < dim; ++d) total[d] += weight * sums[part * dim + d];
        }
        const float factor = call.store_row(at, total.data(), peak, denominator);
        for (int64_t split = 0; split < splits; ++split)
            call.scale_chunk_mass(at, split * step, std::min(call.tokens, (split + 1) * step),
                             std::exp2(peaks[split * rows + at] - peak) * factor);
    }
}

template <typename Side> static void attend_bfloat16(const Call<Side>& call) {
#ifdef OFFLOAD_RT_BF16_DOTS
    if (call.dim % Bf16DotProducts::STEP == 0) return attend<Bf16DotProducts>(call);
#endif
    attend<WidenedProducts<BFloat16>>(call);
}

extern "C" {

void offload_rt_attend_float32(const Call<Pages<float>>* call) { attend<WidenedProducts<float>>(*call); }

void offload_rt_attend_bfloat16(const Call<Pages<BFloat16>>* call) { attend_bfloat16(*call); }

#define OFFLOAD_RT_QUANTIZED(BITS)                                                                                  \
    void offload_rt_attend_float32_##BITS(const Call<Quantized<float, BITS>>* call) {                               \
        attend<WidenedProducts<float>>(*call);                                                                      \
    }                                                                                                               \
    void offload_rt_attend_bfloat16_##BITS(const Call<Quantized<BFloat16, BITS>>* call) { attend_bfloat16(*call); } \
    void offload_rt_quantize_float32_##BITS(const Quantize<float, BITS>* call) { call->run(); }                     \
    void offload_rt_quantize_bfloat16_##BITS(const Quantize<BFloat16, BITS>* call) { call->run(); }

OFFLOAD_RT_QUANTIZED(8)
OFFLOAD_RT_QUANTIZED(4)

void offload_rt_attend_packed(const Call<PackedPages>* call) { attend_bfloat16(*call); }

// Packs `count` pages.
void offload_rt_pack(const PackedShape* shape, const uint16_t* pages, int64_t count, uint8_t* packed, int64_t threads) {
    const int64_t values = shape->sides() * shape->page_tokens * shape->dim;
#pragma omp parallel for num_threads(int(threads)) if (count > 1)
    for (int64_t page = 0; page < count; ++page) pack(*shape, pages + page * values, packed + page * shape->nbytes);
}

// Unpacks `count` runs of `tokens` tokens, given their pages, heads and first tokens, to `out` [count][tokens][dim]. Heads
// of keys and values are counted together.
void offload_rt_unpack(const PackedShape* shape, const uint8_t* packed, const int64_t* pages, const int64_t* heads,
                       const int64_t* first, int64_t count, int64_t tokens, BFloat16* out, int64_t threads) {
    const int64_t size = tokens * shape->dim;
#pragma omp parallel for num_threads(int(threads)) if (count * size > 65536)
    for (int64_t run = 0; run < count; ++run)
        unpack(*shape, packed + pages[run] * shape->nbytes, heads[run], first[run], tokens, out + run * size);
}

int64_t offload_rt_lanes() { return LANES; }

// Returns the bytes of a structure that callers fill in, by its name there; 0 if there is none of that name.
int64_t offload_rt_sizeof(const char* name) {
    const std::pair<const char*, size_t> sizes[] = {
        {"Pages", sizeof(Pages<float>)},
        {"PackedShape", sizeof(PackedShape)},
        {"PackedPages", sizeof(PackedPages)},
        {"Quantized", sizeof(Quantized<float, 8>)},
        {"Quantize", sizeof(Quantize<float, 8>)},
        {"Call", sizeof(Call<Pages<float>>)},
        {"PackedCall", sizeof(Call<PackedPages>)},
        {"QuantizedCall", sizeof(Call<Quantized<float, 8>>)},
        {"Matrix", sizeof(Matrix<float>)},
        {"Norm", sizeof(Norm<float>)},
        {"Layer", sizeof(Layer<float>)},
        {"LayerCall", sizeof(LayerCall<float>)},
        {"ProductCall", sizeof(ProductCall<float>)},
    };
    for (const auto& [known, size] : sizes)
        if (!std::strcmp(known, name)) return int64_t(size);
    return 0;
}

// Returns 1 if bfloat16 uses the processor's dot products.
int64_t offload_rt_bfloat16_dots() {
#ifdef OFFLOAD_RT_BF16_DOTS
    return 1;
#else
    return 0;
#endif
}
}
