// Attention of many queries over keys and values in place in CPU memory, with log-sum-exp.
//
// torch's flash kernel for CPUs is bound by arithmetic from a few queries on. Here a block of keys is
// transposed in registers once for all queries, so that the lanes of a vector are keys for the scores and
// dimensions for the sums, and nothing is reduced across lanes. The matrix products are in widened.h
// (float32, any processor) and bf16_dots.h; this file has the softmax between them and splits the work among
// threads.
//
// The result of a query is the same to the last bit whatever other queries the call has, in whichever calls the
// pages come and however many threads there are. For that, every unit of tokens (a page, or UNIT tokens of it) is
// attended by itself, and the units are added to the result one by one, in order.
//
// Calls share no state: several threads may call at the same time, each with a team of its own.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
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

constexpr double LN2 = 0.6931471805599453;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr int64_t UNIT = 1024;  // tokens, at most
constexpr double MAX_EXPONENT = 80.0;  // of a mass, as in kernels/operators.py

// Memory of the calling thread, valid until its next call for the type: fresh memory would be mapped and zeroed.
template <typename T> static T* own_memory(size_t count) {
    static thread_local std::vector<T> memory;
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

// The factor by which attention mass grows whose reference lies `distance` lower.
static inline float mass_factor(double distance) { return float(std::exp(std::min(distance, MAX_EXPONENT))); }

// Working memory of one thread for `rows` queries: scores and weights of a block of tokens, and the sums over
// all blocks of a unit so far.
template <typename Products> struct Scratch {
    using Weight = typename Products::Weight;
    Products products;
    Buffer<float> scores, sums, peak, denominator, share;
    Buffer<double> found;  // log-sum-exp of a unit
    Buffer<Weight> weights;
    Buffer<typename Products::Entry> entries;  // a block that was decoded
    Scratch(int dim, int rows)
        : products(dim, rows), scores(size_t(rows) * BLOCK), sums(size_t(rows) * dim), peak(rows),
          denominator(size_t(rows + LANES) * LANES), share(rows + LANES), found(rows + LANES), weights(size_t(rows) * BLOCK),
          entries(size_t(BLOCK) * dim) {}

    // Divides the sums of `rows` queries over a unit by the softmax denominators, and sets `share` and `found`.
    void finish_unit(int rows) {
        for (int first = 0; first < rows; first += LANES) {
            Vec lanes[LANES];  // some are of no query
            for (int r = 0; r < LANES; ++r) lanes[r] = load(&denominator[(first + r) * LANES]);
            const Vec total = lane_sums(lanes), log = log2_positive(total), shares = 1.0f / total;
            // A query that sees no key has the output zero and the log-sum-exp -inf.
            for (int r = 0; r < std::min(LANES, rows - first); ++r) {
                share[first + r] = total[r] == 0.0f ? 0.0f : shares[r];
                found[first + r] = total[r] == 0.0f ? -INFINITE : (double(peak[first + r]) + log[r]) * LN2;
            }
        }
        products.finish(&sums[0], &share[0], rows);
    }
};

// Attention mass of one query: its weights summed over each chunk of `size` tokens, of which `filled` chunks
// are done. Not taken if `memory` is null.
struct ChunkMass {
    float* memory;
    int64_t filled, size;
};

// Masks the scores of one query over a block, of which it sees `seen` tokens, and rescales the sums so far to the new
// peak.
template <typename Products>
static inline void raise_peak(Scratch<Products>& s, int scored, int r, int block_tokens, int seen, int dim, const float* mask,
                              const ChunkMass& mass) {
    float* row = &s.scores[scored * BLOCK];
    if (mask)
        for (int k = 0; k < block_tokens; ++k) row[k] += mask[k] * LOG2E;
    for (int k = seen; k < block_tokens || k % LANES; ++k) row[k] = -INFINITE;
    Vec top = load(row);
    for (int k = LANES; k < block_tokens; k += LANES) top = larger(top, load(row + k));
    float peak = highest(top);
    if (!(peak > s.peak[r])) return;
    const float before = s.peak[r];
    s.peak[r] = peak;
    if (before == -INFINITE) return;  // nothing is there to be rescaled
    const float shrink = std::exp2(before - peak);
    store(&s.denominator[r * LANES], load(&s.denominator[r * LANES]) * shrink);
    for (int d = 0; d < dim; d += LANES) store(&s.sums[r * dim + d], load(&s.sums[r * dim + d]) * shrink);
    if (mass.memory)
        for (int64_t chunk = 0; chunk < mass.filled; ++chunk) mass.memory[chunk] *= shrink;
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
// queries each `step`th one is sampled, counted back from the last. Query r of every `ordered` ones sees the first
// `shared` + r + 1 tokens; `ordered` 0: each sees all. `Side` is how keys and values are stored.
template <typename Side> struct Call {
    using T = typename Side::Entry;
    Pages<T> queries;
    Side keys, values;
    float* out;
    double* lse;  // a float would round the weight of all units so far, at every unit
    const float* before;
    const double* lse_before;
    const float* mask;
    float* mass;
    const double* reference;
    int64_t heads, count, tokens, dim, threads, mass_stride, chunk, period, step, ordered, shared;
    float scale;

    // The number of tokens that query `row` of a head sees.
    int64_t seen_by(int64_t row) const { return ordered ? shared + row % ordered + 1 : tokens; }

    // The address of the mass of query `row`, counted over all heads, from `token` on; null if it is not sampled.
    float* chunk_mass_at(int64_t row, int64_t token) const {
        const int64_t before_last = period - 1 - row % period;
        if (!mass || before_last % step) return nullptr;
        const int64_t sampled = (period + step - 1) / step;
        const int64_t at = row / period * sampled + sampled - 1 - before_last / step;
        return mass + at * mass_stride + token / chunk;
    }

    // Begins the result of a query with what it is added to.
    void begin_row(int64_t at) const {
        lse[at] = before ? lse_before[at] : -INFINITE;
        before ? (void)std::copy_n(before + at * dim, dim, out + at * dim) : (void)std::fill_n(out + at * dim, dim, 0.0f);
    }

    // Adds attention over a unit to the results of `rows` queries, at most LANES: row r of `sums`, [rows][dim], and its
    // log-sum-exp to query at[r].
    OWN_REGISTERS void add_unit(int rows, const int64_t* at, const float* sums, const double* found) const {
        float distance[LANES] = {};
        for (int r = 0; r < rows; ++r) distance[r] = float(found[r] - lse[at[r]]);
        const Vec apart = load(distance), less = exp2_nonpositive(larger(apart, -apart) * -LOG2E);
        const Vec most = 1.0f / (1.0f + less), rest = less * most;  // shares of the larger and the smaller one
        const Vec log = log2_positive(1.0f + less);
        for (int r = 0; r < rows; ++r) {
            if (found[r] == -INFINITE) continue;  // it sees no key there
            double& sum = lse[at[r]];
            const bool first = sum == -INFINITE, nearer = apart[r] > 0.0f;
            const float left = first ? 0.0f : nearer ? rest[r] : most[r], added = first ? 1.0f : nearer ? most[r] : rest[r];
            sum = first ? found[r] : std::max(sum, found[r]) + log[r] * LN2;
            float* total = out + at[r] * dim;
            for (int d = 0; d < dim; ++d) total[d] = left * total[d] + added * sums[r * dim + d];
        }
    }

    // Multiplies the mass of a query on tokens first .. last.
    void scale_chunk_mass(int64_t row, int64_t first, int64_t last, float factor) const {
        if (float* from = chunk_mass_at(row, first))
            for (int64_t at = 0; at < (last - first) / chunk; ++at) from[at] *= factor;
    }

    // Units are numbered through all pages.
    int64_t unit_tokens() const { return std::min<int64_t>(keys.page_tokens, UNIT); }
    int64_t units_per_page() const { return (keys.page_tokens + unit_tokens() - 1) / unit_tokens(); }
    int64_t units() const { return unit_of(tokens - 1) + 1; }
    int64_t unit_of(int64_t token) const {
        return token / keys.page_tokens * units_per_page() + token % keys.page_tokens / unit_tokens();
    }
    int64_t start_of(int64_t unit) const {
        return std::min(tokens, unit / units_per_page() * keys.page_tokens + unit % units_per_page() * unit_tokens());
    }
};

// Which tokens the queries of a tree see (`_PathCall`): [count][tokens - shared] rows, and [count] numbers of tokens.
struct PathCall {
    const int32_t *paths, *lengths;
    int64_t count, shared;
};

// The work of a thread at a time: queries row .. row + count of heads head .. head + heads, over units first .. last.
struct Task {
    int64_t head, heads, row, count, first, last;

    // The number of the query, counted over all heads, that is row `r` of the task.
    int64_t query(int64_t r, int64_t of_head) const { return (head + r / count) * of_head + row + r % count; }
};

// Adds the units of a task to the results of its queries, when the tasks for the tokens before it have done so.
template <typename Side> class Adder {
  public:
    // `turn` is shared by the tasks for these queries: how many of them are done. This is number `number`.
    Adder(const Call<Side>& call, const Task& task, int64_t number, int64_t* turn)
        : call_(call), task_(task), rows_(int(task.heads * task.count)), number_(number), turn_(turn) {
        for (int r = 0; r < (number ? 0 : rows_); ++r) call.begin_row(task.query(r, call.count));
    }

    // Adds the next unit: sums [rows][dim] and log-sum-exps [rows], which are kept until it is the task's turn.
    void add(const float* sums, const double* found) {
        if (is_turn()) {
            add_kept();
            return add_now(sums, found);
        }
        const int64_t values = rows_ * call_.dim, units = task_.last - task_.first;
        sums_ = own_memory<float>(units * values), found_ = own_memory<double>(units * rows_);
        std::copy_n(sums, values, sums_ + kept_ * values);
        std::copy_n(found, rows_, found_ + kept_ * rows_);
        ++kept_;
    }

    // Waits for the tasks before it, which other threads run already, adds what is left, and gives the turn on.
    void finish() {
        while (!is_turn()) std::this_thread::yield();
        add_kept();
        __atomic_store_n(turn_, number_ + 1, __ATOMIC_RELEASE);
    }

  private:
    bool is_turn() const { return __atomic_load_n(turn_, __ATOMIC_ACQUIRE) == number_; }

    void add_kept() {
        for (int64_t unit = 0; unit < kept_; ++unit) add_now(sums_ + unit * rows_ * call_.dim, found_ + unit * rows_);
        kept_ = 0;
    }

    void add_now(const float* sums, const double* found) const {
        for (int first = 0; first < rows_; first += LANES) {
            const int some = std::min(LANES, rows_ - first);
            int64_t queries[LANES];
            for (int r = 0; r < some; ++r) queries[r] = task_.query(first + r, call_.count);
            call_.add_unit(some, queries, sums + first * call_.dim, found + first);
        }
    }

    const Call<Side>& call_;
    const Task& task_;
    const int rows_;
    const int64_t number_;
    int64_t* const turn_;
    int64_t kept_ = 0;  // units
    float* sums_ = nullptr;
    double* found_ = nullptr;
};

// Attends unit by unit. Calls `add(unit)` when attention of all rows over a unit is in `s.sums` and `s.found`.
//
// In a unit it goes head by head, so that memory is read in order. One head at a time (without `AllHeads`) is
// compiled separately, as its loops are faster.
template <bool AllHeads, typename Products, typename Side, typename Add>
static void attend_task(const Call<Side>& call, const Task& task, Scratch<Products>& s, const Add& add) {
    const int heads = AllHeads ? int(task.heads) : 1;
    const int rows = int(heads * task.count), count = int(task.count), dim = int(call.dim);
    for (int64_t h = 0; h < heads; ++h)
        s.products.set_queries(int(h) * count, call.queries.at(task.head + h, task.row), call.queries.row_stride,
                               count, call.scale);
    int64_t seen = 0;
    for (int r = 0; r < count; ++r) seen = std::max(seen, call.seen_by(task.row + r));
    for (int64_t unit = task.first; unit < task.last && call.start_of(unit) < seen; ++unit) {
        const int64_t start = call.start_of(unit), end = std::min(seen, call.start_of(unit + 1));
        std::fill_n(&s.sums[0], rows * dim, 0.0f);
        std::fill_n(&s.peak[0], rows, -INFINITE);
        std::fill_n(&s.denominator[0], rows * LANES, 0.0f);
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t at = start, next; at < end; at = next) {
                next = std::min(end, at + BLOCK);
                const int block_tokens = int(next - at), base = AllHeads ? int(h) * count : 0;
                // The block to prefetch: the next one; at the end of a unit the next head's first one, and after
                // the last head the first one of the next unit.
                const int64_t head = task.head + h, heads_left = heads - h - 1;
                const int64_t then = next < end ? head : heads_left ? head + 1 : task.head;
                const int64_t from = next < end || !heads_left ? next : start;
                const auto keys = call.keys.block(head, at, block_tokens, &s.entries[0]);
                s.products.score(base, keys.data, call.keys.ahead(then, from), keys.stride, block_tokens, count, &s.scores[0]);
                // Two loops, so that independent peaks overlap and no weight waits for its peak.
                const auto mass = [&](int r) {
                    return ChunkMass{call.chunk_mass_at(head * call.count + task.row + r, start), (at - start) / call.chunk,
                                     call.chunk};
                };
                for (int r = 0; r < count; ++r)
                    raise_peak(s, r, base + r, block_tokens, int(std::clamp<int64_t>(call.seen_by(task.row + r) - at, 0, block_tokens)), dim,
                               call.mask ? call.mask + (task.row + r) * call.tokens + at : nullptr, mass(r));
                for (int r = 0; r < count; ++r) softmax_weights(s, r, base + r, block_tokens, mass(r));
                const auto values = call.values.block(head, at, block_tokens, &s.entries[0]);
                s.products.sum(&s.weights[0], values.data, call.values.ahead(then, from), values.stride, block_tokens,
                               count, &s.sums[base * dim]);
            }
        s.finish_unit(rows);
        for (int r = 0; r < (call.mass ? rows : 0); ++r) {
            const int64_t at = task.query(r, call.count);
            const float factor = call.reference ? mass_factor(s.found[r] - call.reference[at]) : 1.0f;
            call.scale_chunk_mass(at, start, end, s.share[r] * factor);
        }
        add(unit);
    }
}

template <typename Products, typename Side> static void attend(const Call<Side>& call) {
    const int64_t rows = call.heads * call.count, dim = call.dim, units = call.tokens ? call.units() : 0;
    // With few queries, all heads at once if that leaves every thread enough work.
    const bool all_heads = rows <= QUERY_TILE && units > 1 && call.tokens >= 4096 * call.threads;
    const int64_t heads = all_heads ? call.heads : 1, groups = call.heads / heads;
    // With few heads and queries, tokens are split, so that every thread has work.
    const int64_t tiles = (call.count + QUERY_TILE - 1) / QUERY_TILE, wanted = call.threads > 1 ? 4 * call.threads : 1;
    const int64_t columns = groups * tiles, most = std::clamp<int64_t>(call.tokens / 1024, 1, std::max<int64_t>(units, 1));
    int64_t splits = std::clamp<int64_t>((wanted + columns - 1) / columns, 1, most);
    const int64_t step = std::max<int64_t>(1, (units + splits - 1) / splits);
    splits = std::max<int64_t>(1, (units + step - 1) / step);
    std::vector<int64_t> turns(columns);
    std::vector<double> every(call.mass && !call.reference ? rows * units : 0);  // log-sum-exp of every unit

#pragma omp parallel num_threads(int(call.threads)) if (columns * splits > 1)
    {
        Scratch<Products> s(int(dim), int(std::min<int64_t>(heads * call.count, QUERY_TILE)));
// In order of the tokens, so that a thread seldom waits for its turn.
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t number = 0; number < columns * splits; ++number) {
            const int64_t split = number / columns, column = number % columns, row = column % tiles * QUERY_TILE;
            const Task task{column / tiles * heads, heads, row, std::min<int64_t>(QUERY_TILE, call.count - row), split * step,
                            std::min(units, (split + 1) * step)};
            Adder<Side> adder(call, task, split, &turns[column]);
            const auto add = [&](int64_t unit) {
                for (int64_t r = 0; r < (every.empty() ? 0 : task.heads * task.count); ++r)
                    every[task.query(r, call.count) * units + unit] = s.found[r];
                adder.add(&s.sums[0], &s.found[0]);
            };
            all_heads ? attend_task<true>(call, task, s, add) : attend_task<false>(call, task, s, add);
            adder.finish();
        }
#pragma omp for schedule(static)
        for (int64_t at = 0; at < (every.empty() ? 0 : rows); ++at)
            for (int64_t unit = 0; unit < units; ++unit)
                call.scale_chunk_mass(at, call.start_of(unit), call.start_of(unit + 1),
                                      mass_factor(every[at * units + unit] - call.lse[at]));
    }
}

template <typename Side> static void attend_bfloat16(const Call<Side>& call) {
#ifdef OFFLOAD_RT_BF16_DOTS
    if (call.dim % Bf16DotProducts::STEP == 0) return attend<Bf16DotProducts>(call);
#endif
    attend<WidenedProducts<BFloat16>>(call);
}

// Attends in the products of the entries' type.
static void attend_entries(const Call<Path<float>>& call) { attend<WidenedProducts<float>>(call); }
static void attend_entries(const Call<Path<BFloat16>>& call) { attend_bfloat16(call); }

// Attends tokens of a tree, each over the `shared` first tokens of the call and a path behind them: token j of those
// that query q sees is row paths[q][j - shared] of the pages. A query is called by itself, as if its tokens lay in order.
template <typename T> static void attend_paths(const Call<Pages<T>>& call, const PathCall& tree) {
    const int64_t group = call.count / tree.count, dim = call.dim, longest = call.tokens - tree.shared;
#pragma omp parallel for num_threads(int(call.threads)) schedule(dynamic, 1)
    for (int64_t q = 0; q < tree.count; ++q) {
        std::vector<float> sums(call.heads * group * dim), sums_before(call.before ? sums.size() : 0);
        std::vector<double> lse(call.heads * group), lse_before(call.before ? lse.size() : 0);
        const auto each_row = [&](const auto& row) {
            for (int64_t at = 0; at < call.heads * group; ++at) row(at, at / group * call.count + at % group * tree.count + q);
        };
        if (call.before)
            each_row([&](int64_t own, int64_t at) {
                std::copy_n(call.before + at * dim, dim, &sums_before[own * dim]);
                lse_before[own] = call.lse_before[at];
            });
        Call<Path<T>> one{};
        one.queries = call.queries;
        one.queries.data += q * call.queries.row_stride, one.queries.row_stride *= tree.count;
        one.queries.page_tokens = group;
        const int32_t* path = tree.paths + q * longest;
        one.keys = {call.keys, path, tree.shared, call.keys.page_tokens, dim};
        one.values = {call.values, path, tree.shared, call.values.page_tokens, dim};
        one.out = sums.data(), one.lse = lse.data();
        if (call.before) one.before = sums_before.data(), one.lse_before = lse_before.data();
        one.heads = call.heads, one.count = group, one.tokens = tree.lengths[q], one.dim = dim, one.threads = 1;
        one.chunk = one.period = one.step = 1, one.scale = call.scale;
        attend_entries(one);
        each_row([&](int64_t own, int64_t at) {
            std::copy_n(&sums[own * dim], dim, call.out + at * dim);
            call.lse[at] = lse[own];
        });
    }
}

extern "C" {

void offload_rt_attend_float32(const Call<Pages<float>>* call) { attend<WidenedProducts<float>>(*call); }

void offload_rt_attend_bfloat16(const Call<Pages<BFloat16>>* call) { attend_bfloat16(*call); }

void offload_rt_attend_paths_float32(const Call<Pages<float>>* call, const PathCall* tree) { attend_paths(*call, *tree); }

void offload_rt_attend_paths_bfloat16(const Call<Pages<BFloat16>>* call, const PathCall* tree) { attend_paths(*call, *tree); }

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
        {"PathCall", sizeof(PathCall)},
        {"PackedCall", sizeof(Call<PackedPages>)},
        {"QuantizedCall", sizeof(Call<Quantized<float, 8>>)},
        {"Matrix", sizeof(Matrix<float>)},
        {"Norm", sizeof(Norm<float>)},
        {"Layer", sizeof(Layer<float>)},
        {"LayerCall", sizeof(LayerCall<float>)},
        {"ProductCall", sizeof(ProductCall<float>)},
        {"Split", sizeof(Split)},
    };
    for (const auto& [known, size] : sizes)
        if (!std::strcmp(known, name)) return int64_t(size);
    return 0;
}

// Returns 1 if the processor has tiles of bfloat16, and this process may use them.
int64_t offload_rt_bfloat16_tiles() { return has_tiles<BFloat16>(); }

// Returns 1 if bfloat16 uses the processor's dot products.
int64_t offload_rt_bfloat16_dots() {
#ifdef OFFLOAD_RT_BF16_DOTS
    return 1;
#else
    return 0;
#endif
}
}
