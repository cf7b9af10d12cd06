// Attention of many queries over keys and values where they lie in CPU memory, with log-sum-exp.
//
// torch's flash kernel for CPUs is bound by arithmetic from a few queries on. Here a block of keys is
// transposed in registers once for all queries, so that the lanes of a vector are keys for the scores and
// dimensions for the sums, and nothing is reduced across lanes. The products themselves are in widened.h
// (float32, any processor) and bf16_dots.h; here is the softmax between them and the work of the threads.
//
// Nothing is shared between calls: threads of a program may call at the same time, each with its own team.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "bf16_dots.h"
#include "block.h"
#include "vectors.h"
#include "widened.h"

constexpr float LN2 = 0.6931471805599453f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Working memory of one thread: of `rows` queries, the scores and weights of a block of tokens, and what is
// summed over all of them.
template <typename Products> struct Scratch {
    using Weight = typename Products::Weight;
    Products products;
    Buffer<float> scores, sums, peak, mass;
    Buffer<Weight> weights;
    Scratch(int dim, int rows)
        : products(dim, rows), scores(size_t(rows) * BLOCK), sums(size_t(rows) * dim), peak(rows),
          mass(size_t(rows) * LANES), weights(size_t(rows) * BLOCK) {}

    // The mass of a query is summed lane by lane, and over the lanes only here.
    float total_mass(int row) const {
        float total = 0.0f;
        for (int lane = 0; lane < LANES; ++lane) total += mass[row * LANES + lane];
        return total;
    }
};

// The weights of one query, summed over every `size` tokens from the task's first one on; of no query where
// there is no memory.
struct Units {
    float* memory;
    int64_t filled, size;
};

// Completes the scores of one query over a block, and scales what was summed before to the new peak.
template <typename Products>
static inline void raise_peak(Scratch<Products>& s, int scored, int r, int held, int dim, const float* mask,
                              const Units& units) {
    float* row = &s.scores[scored * BLOCK];
    if (mask)
        for (int k = 0; k < held; ++k) row[k] += mask[k] * LOG2E;
    for (int k = held; k % LANES; ++k) row[k] = -INFINITE;
    Vec top = load(row);
    for (int k = LANES; k < held; k += LANES) top = larger(top, load(row + k));
    float peak = highest(top);
    if (!(peak > s.peak[r])) return;
    float shrink = std::exp2(s.peak[r] - peak);
    store(&s.mass[r * LANES], load(&s.mass[r * LANES]) * shrink);
    for (int d = 0; d < dim; d += LANES) store(&s.sums[r * dim + d], load(&s.sums[r * dim + d]) * shrink);
    if (units.memory)
        for (int64_t unit = 0; unit < units.filled; ++unit) units.memory[unit] *= shrink;
    s.peak[r] = peak;
}

// Scores of one query over a block to weights.
template <typename Products>
static inline void soften(Scratch<Products>& s, int scored, int r, int held, const Units& units) {
    const float* row = &s.scores[scored * BLOCK];
    auto* weights = &s.weights[scored * BLOCK];
    // Where everything so far is masked, or not a number, that must come out as such.
    float peak = s.peak[r] == -INFINITE ? 0.0f : s.peak[r];
    Vec mass = load(&s.mass[r * LANES]);
    float* sums = units.memory ? units.memory + units.filled : nullptr;
    Vec unit = {};
    for (int k = 0; k < held; k += LANES) {
        Vec weight = exp2_nonpositive(load(row + k) - peak);
        store(weights + k, weight);
        mass += weight;
        if (!sums) continue;
        unit += weight;
        if ((k + LANES) % units.size && units.size > LANES) continue;
        int size = int(std::min<int64_t>(units.size, LANES));
        unit = grouped_sum(unit, size);
        for (int lane = 0; lane < LANES && k + lane < held; lane += size) *sums++ = unit[lane];
        unit = Vec{};
    }
    store(&s.mass[r * LANES], mass);
}

// Entries [pages, heads, page_tokens, dim]; strides count entries, those of a row are contiguous.
template <typename T> struct Pages {
    const T* data;
    int64_t page_stride, head_stride, row_stride, page_tokens;
    const T* at(int64_t head, int64_t token) const {
        return data + token / page_tokens * page_stride + head * head_stride + token % page_tokens * row_stride;
    }
};

// What a caller hands over (`_Call` in __init__.py): queries, keys of `tokens` tokens and values alike;
// out [heads, count, dim], lse [heads, count] and mask [count, tokens], or none, are contiguous. So are `units`
// [heads, weighed, tokens / unit], or none: what some of the queries attend to every `unit` tokens, of one in all.
// A unit is a power of two, at most BLOCK, and lies within a page. Of every `period` queries each `step`th one is
// weighed, the last one among them.
template <typename T> struct Call {
    Pages<T> queries, keys, values;
    T* out;
    float* lse;
    const float* mask;
    float* units;
    int64_t heads, count, tokens, dim, threads, unit, period, step;
    float scale;

    // Where the units of query `row` of all heads from a token on stand; none where it is not weighed.
    float* units_at(int64_t row, int64_t token) const {
        const int64_t before_last = period - 1 - row % period;
        if (!units || before_last % step) return nullptr;
        const int64_t weighed = (period + step - 1) / step;
        const int64_t at = row / period * weighed + weighed - 1 - before_last / step;
        return units + (at * tokens + token) / unit;
    }

    // One row of the result, from its sums (not divided), its largest score and its mass. A query that sees
    // nothing has an output of zero and the log-sum-exp -inf, so that it vanishes when parts are merged.
    void put(int64_t at, const float* sums, float peak, float mass) const {
        float whole = mass == 0.0f ? 1.0f : mass;
        for (int d = 0; d < dim; ++d) narrow(sums[d] / whole, out + at * dim + d);
        lse[at] = (peak + std::log2(mass)) * LN2;
    }

    // Scales the units of tokens first .. last of a query.
    void scale_units(int64_t row, int64_t first, int64_t last, float factor) const {
        if (float* from = units_at(row, first))
            for (int64_t at = 0; at < (last - first) / unit; ++at) from[at] *= factor;
    }
};

// What one thread attends at a time: queries row .. row + count of heads head .. head + heads, over keys and
// values first .. last.
struct Task {
    int64_t head, heads, row, count, first, last;
};

// Leaves sums (not divided), the largest score and the mass of each query, head by head, in `s`.
//
// Page by page, and in a page head by head: memory is read in the order in which it lies. What goes through one
// head at a time (not `Together`) is compiled apart, for its loops are the faster ones.
template <bool Together, typename Products, typename T = typename Products::Entry>
static void attend_task(const Call<T>& call, const Task& task, Scratch<Products>& s) {
    const int heads = Together ? int(task.heads) : 1;
    const int rows = int(heads * task.count), count = int(task.count), dim = int(call.dim);
    for (int64_t h = 0; h < heads; ++h)
        s.products.set_queries(int(h) * count, call.queries.at(task.head + h, task.row), call.queries.row_stride,
                               count, call.scale);
    std::fill_n(&s.sums[0], rows * dim, 0.0f);
    std::fill_n(&s.peak[0], rows, -INFINITE);
    std::fill_n(&s.mass[0], rows * LANES, 0.0f);
    const int64_t page = call.keys.page_tokens;
    for (int64_t start = task.first, end; start < task.last; start = end) {
        end = std::min(task.last, start - start % page + page);
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t at = start, next; at < end; at = next) {
                next = std::min(end, at + BLOCK);
                const int held = int(next - at), base = Together ? int(h) * count : 0;
                // Read after this block: the one behind it; at the end of a page the next head's first one, and
                // after the last head that of the next page.
                const int64_t head = task.head + h, heads_left = heads - h - 1;
                const int64_t then = next < end ? head : heads_left ? head + 1 : task.head;
                const int64_t from = next < end || !heads_left ? next : start;
                s.products.score(base, call.keys.at(head, at), call.keys.at(then, from), call.keys.row_stride, held,
                                 count, &s.scores[0]);
                // One after the other: the peaks of all queries do not wait for each other, nor the weights for
                // a peak.
                const auto units = [&](int r) {
                    return Units{call.units_at(head * call.count + task.row + r, task.first), (at - task.first) / call.unit,
                                 call.unit};
                };
                for (int r = 0; r < count; ++r)
                    raise_peak(s, r, base + r, held, dim,
                               call.mask ? call.mask + (task.row + r) * call.tokens + at : nullptr, units(r));
                for (int r = 0; r < count; ++r) soften(s, r, base + r, held, units(r));
                s.products.sum(&s.weights[0], call.values.at(head, at), call.values.at(then, from),
                               call.values.row_stride, held, count, &s.sums[base * dim]);
            }
    }
    s.products.finish(&s.sums[0], rows);
}

template <typename Products, typename T = typename Products::Entry> static void attend(const Call<T>& call) {
    const int64_t rows = call.heads * call.count, dim = call.dim, most = call.tokens / 1024;
    // Of few queries all heads at once, where that leaves every thread enough to do.
    const bool together = rows <= QUERY_TILE && call.keys.page_tokens < call.tokens && most >= 4 * call.threads;
    const int64_t heads = together ? call.heads : 1, groups = call.heads / heads;
    const int64_t tiles = (call.count + QUERY_TILE - 1) / QUERY_TILE;
    // Few heads and few queries leave threads without work: then the keys are split too.
    int64_t wanted = std::max<int64_t>(1, (4 * call.threads + groups * tiles - 1) / (groups * tiles));
    int64_t splits = std::clamp<int64_t>(most, 1, wanted);
    int64_t step = std::max<int64_t>(1, ((call.tokens + splits - 1) / splits + BLOCK - 1) / BLOCK) * BLOCK;
    splits = std::max<int64_t>(1, (call.tokens + step - 1) / step);
    std::vector<float> sums(splits > 1 ? splits * rows * dim : 0);
    std::vector<float> peaks(splits > 1 ? splits * rows : 0), masses(peaks.size());
    const int64_t tasks = groups * tiles * splits;

#pragma omp parallel num_threads(int(call.threads)) if (tasks > 1)
    {
        Scratch<Products> s(int(call.dim), int(std::min<int64_t>(heads * call.count, QUERY_TILE)));
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < tasks; ++number) {
            int64_t split = number % splits, row = number / splits % tiles * QUERY_TILE;
            Task task{number / splits / tiles * heads, heads, row, std::min<int64_t>(QUERY_TILE, call.count - row),
                      split * step, std::min(call.tokens, (split + 1) * step)};
            together ? attend_task<true>(call, task, s) : attend_task<false>(call, task, s);
            for (int r = 0; r < task.heads * task.count; ++r) {
                int64_t at = (task.head + r / task.count) * call.count + row + r % task.count;
                int64_t part = split * rows + at;
                if (splits > 1) {
                    std::copy_n(&s.sums[r * dim], dim, &sums[part * dim]);
                    peaks[part] = s.peak[r];
                    masses[part] = s.total_mass(r);
                } else {
                    call.put(at, &s.sums[r * dim], s.peak[r], s.total_mass(r));
                    call.scale_units(at, 0, call.tokens, 1.0f / s.total_mass(r));
                }
            }
        }
    }
    if (splits == 1) return;
#pragma omp parallel for num_threads(int(call.threads)) if (call.units)
    for (int64_t at = 0; at < rows; ++at) {
        std::vector<float> total(dim);
        float peak = -INFINITE, mass = 0.0f;
        for (int64_t split = 0; split < splits; ++split) peak = std::max(peak, peaks[split * rows + at]);
        for (int64_t split = 0; split < splits; ++split) {
            int64_t part = split * rows + at;
            if (masses[part] == 0.0f) continue;
            float weight = std::exp2(peaks[part] - peak);
            mass += weight * masses[part];
            for (int64_t d = 0; d < dim; ++d) total[d] += weight * sums[part * dim + d];
        }
        call.put(at, total.data(), peak, mass);
        for (int64_t split = 0; split < splits; ++split)
            call.scale_units(at, split * step, std::min(call.tokens, (split + 1) * step),
                             std::exp2(peaks[split * rows + at] - peak) / mass);
    }
}

extern "C" {

void offload_rt_attend_float32(const Call<float>* call) { attend<WidenedProducts<float>>(*call); }

void offload_rt_attend_bfloat16(const Call<BFloat16>* call) {
#ifdef OFFLOAD_RT_BF16_DOTS
    if (call->dim % Bf16DotProducts::STEP == 0) return attend<Bf16DotProducts>(*call);
#endif
    attend<WidenedProducts<BFloat16>>(*call);
}

int64_t offload_rt_lanes() { return LANES; }

// Whether bfloat16 goes through dot products of the processor.
int64_t offload_rt_bfloat16_dots() {
#ifdef OFFLOAD_RT_BF16_DOTS
    return 1;
#else
    return 0;
#endif
}
}
