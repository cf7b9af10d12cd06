// Attention of many queries over keys and values where they lie in CPU memory, with log-sum-exp.
//
// torch's flash kernel for CPUs is bound by arithmetic from a few queries on. Here a block of keys is
// transposed in registers once for all queries, so that the lanes of a vector are keys for the scores and
// dimensions for the sums, and nothing is reduced across lanes.
//
// Written with the compiler's vector extensions: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

constexpr int BLOCK = 128;       // keys whose scores are held at a time
constexpr int QUERY_TILE = 64;   // queries that share one transposition of a block of keys
constexpr int SCORE_ROWS = 8;    // times GROUPS accumulators in registers while scoring
constexpr int GROUPS = 2;        // of LANES keys each, transposed and scored together
constexpr int SUM_ROWS = 4;      // times SUM_VECS accumulators in registers while summing values
constexpr int SUM_VECS = 4;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

struct BFloat16 { uint16_t bits; };

static inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline Vec load(const BFloat16* p) {
    typedef uint16_t Half __attribute__((vector_size(LANES * 2)));
    Half h;
    std::memcpy(&h, p, sizeof h);
    IntVec wide = __builtin_convertvector(h, IntVec) << 16;
    Vec v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
}
static inline float widen(float x) { return x; }
static inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
static inline void narrow(float x, float* p) { *p = x; }
static inline void narrow(float x, BFloat16* p) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline Vec splat(float x) { return x - Vec{}; }

// 2^x for x <= 0, 0 below -126, NaN for NaN; relative error below 2e-7.
static inline Vec exp2_nonpositive(Vec x) {
    IntVec vanishes = x <= splat(-126.0f);
    Vec safe = vanishes ? splat(-126.0f) : x;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec whole = (safe + magic) - magic;
    Vec f = safe - whole;
    Vec p = splat(1.5403530e-4f);
    p = p * f + splat(1.3333558e-3f);
    p = p * f + splat(9.6181291e-3f);
    p = p * f + splat(5.5504109e-2f);
    p = p * f + splat(2.4022651e-1f);
    p = p * f + splat(6.9314718e-1f);
    p = p * f + splat(1.0f);
    IntVec exponent = (__builtin_convertvector(whole, IntVec) + 127) << 23;
    Vec power;
    std::memcpy(&power, &exponent, sizeof power);
    Vec result = p * power;
    return vanishes ? splat(0.0f) : result;
}

// One step of a LANES x LANES transposition: swaps the off-diagonal blocks of size H.
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

// The largest lane.
static inline float highest(Vec x) {
    for (int h = LANES / 2; h > 0; h /= 2) {
        IntVec other;
        for (int lane = 0; lane < LANES; ++lane) other[lane] = lane ^ h;
        Vec y = __builtin_shuffle(x, other);
        x = x > y ? x : y;
    }
    return x[0];
}

// Scores of R queries against the keys in `keys_t` [dim][GROUPS][LANES].
template <int R>
static inline void score_rows(const float* q, int dim, const float* keys_t, float* scores) {
    Vec acc[R][GROUPS] = {};
    for (int d = 0; d < dim; ++d) {
        Vec k[GROUPS];
        for (int g = 0; g < GROUPS; ++g) k[g] = load(keys_t + (d * GROUPS + g) * LANES);
        for (int r = 0; r < R; ++r) {
            Vec weight = splat(q[r * dim + d]);
            for (int g = 0; g < GROUPS; ++g) acc[r][g] += weight * k[g];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < GROUPS; ++g) store(scores + r * BLOCK + g * LANES, acc[r][g]);
}

// sums[r][0 .. SUM_VECS*LANES) += weights[r][k] * values[k], k < keys.
template <int R, int W, typename T>
static inline void sum_rows(const float* weights, const T* values, int64_t token_stride, int keys, float* sums, int dim) {
    // From zero: a sum over all keys in one chain would lose digits with their number.
    Vec acc[R][W] = {};
    for (int k = 0; k < keys; ++k) {
        const T* row = values + k * token_stride;
        Vec v[W];
        for (int w = 0; w < W; ++w) v[w] = load(row + w * LANES);
        for (int r = 0; r < R; ++r) {
            float weight = weights[r * BLOCK + k];
            for (int w = 0; w < W; ++w) acc[r][w] += weight * v[w];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) {
            float* sum = sums + r * dim + w * LANES;
            store(sum, load(sum) + acc[r][w]);
        }
}

template <int W, typename T>
static inline void sum_columns(int queries, const float* weights, const T* values, int64_t token_stride, int keys, float* sums, int dim) {
    int q = 0;
    for (; q + SUM_ROWS <= queries; q += SUM_ROWS)
        sum_rows<SUM_ROWS, W>(weights + q * BLOCK, values, token_stride, keys, sums + q * dim, dim);
    for (; q < queries; ++q)
        sum_rows<1, W>(weights + q * BLOCK, values, token_stride, keys, sums + q * dim, dim);
}

// Working memory of one thread.
struct Scratch {
    std::vector<float> q, keys_t, scores, sums, peak, mass;
    explicit Scratch(int dim)
        : q(QUERY_TILE * dim), keys_t(dim * GROUPS * LANES), scores(QUERY_TILE * BLOCK), sums(QUERY_TILE * dim),
          peak(QUERY_TILE), mass(QUERY_TILE * LANES) {}

    // The mass of a query is summed lane by lane, and over the lanes only here.
    float total_mass(int row) const {
        float total = 0.0f;
        for (int lane = 0; lane < LANES; ++lane) total += mass[row * LANES + lane];
        return total;
    }
};

// Queries [count, dim] over keys and values first .. last of one head. Leaves sums (not divided), the
// largest score and the mass of each query in `s`; scores are in powers of two.
template <typename T>
static void attend_tile(const T* q, int64_t q_stride, int count, const T* keys, int64_t k_stride, const T* values,
                        int64_t v_stride, int64_t first, int64_t last, int dim, float scale, const float* mask,
                        int64_t mask_stride, Scratch& s) {
    for (int r = 0; r < count; ++r)
        for (int d = 0; d < dim; ++d) s.q[r * dim + d] = widen(q[r * q_stride + d]) * scale * LOG2E;
    std::fill_n(s.sums.begin(), count * dim, 0.0f);
    std::fill_n(s.peak.begin(), count, -std::numeric_limits<float>::infinity());
    std::fill_n(s.mass.begin(), count * LANES, 0.0f);
    for (int64_t start = first; start < last; start += BLOCK) {
        int held = int(std::min<int64_t>(BLOCK, last - start));
        for (int group = 0; group < held; group += GROUPS * LANES) {
            for (int g = 0; g < GROUPS; ++g) {
                int lanes = std::clamp(held - group - g * LANES, 0, LANES);
                const T* base = keys + (start + group + g * LANES) * k_stride;
                for (int d = 0; d < dim; d += LANES) {
                    Vec rows[LANES];
                    for (int i = 0; i < LANES; ++i) rows[i] = i < lanes ? load(base + i * k_stride + d) : Vec{};
                    transpose(rows);
                    for (int i = 0; i < LANES; ++i) store(&s.keys_t[((d + i) * GROUPS + g) * LANES], rows[i]);
                }
            }
            int r = 0;
            for (; r + SCORE_ROWS <= count; r += SCORE_ROWS)
                score_rows<SCORE_ROWS>(&s.q[r * dim], dim, s.keys_t.data(), &s.scores[r * BLOCK + group]);
            for (; r + 2 <= count; r += 2)
                score_rows<2>(&s.q[r * dim], dim, s.keys_t.data(), &s.scores[r * BLOCK + group]);
            if (r < count) score_rows<1>(&s.q[r * dim], dim, s.keys_t.data(), &s.scores[r * BLOCK + group]);
        }
        int padded = (held + LANES - 1) / LANES * LANES;
        for (int r = 0; r < count; ++r) {
            float* row = &s.scores[r * BLOCK];
            if (mask)
                for (int k = 0; k < held; ++k) row[k] += mask[r * mask_stride + start + k] * LOG2E;
            for (int k = held; k < padded; ++k) row[k] = -std::numeric_limits<float>::infinity();
            Vec top = load(row);
            for (int k = LANES; k < padded; k += LANES) {
                Vec x = load(row + k);
                top = x > top ? x : top;
            }
            float peak = std::max(s.peak[r], highest(top));
            Vec mass = load(&s.mass[r * LANES]);
            if (peak > s.peak[r]) {
                float shrink = std::exp2(s.peak[r] - peak);
                mass *= shrink;
                for (int d = 0; d < dim; d += LANES) store(&s.sums[r * dim + d], load(&s.sums[r * dim + d]) * shrink);
                s.peak[r] = peak;
            } else if (peak == -std::numeric_limits<float>::infinity()) {
                // Everything so far is masked, or not a number: that must come out as such.
                for (int k = 0; k < padded; ++k) row[k] = std::isnan(row[k]) ? row[k] : 0.0f;
                continue;
            }
            for (int k = 0; k < padded; k += LANES) {
                Vec weight = exp2_nonpositive(load(row + k) - peak);
                store(row + k, weight);
                mass += weight;
            }
            store(&s.mass[r * LANES], mass);
        }
        const T* base = values + start * v_stride;
        int d = 0;
        for (; d + SUM_VECS * LANES <= dim; d += SUM_VECS * LANES)
            sum_columns<SUM_VECS>(count, s.scores.data(), base + d, v_stride, held, s.sums.data() + d, dim);
        for (; d < dim; d += LANES)
            sum_columns<1>(count, s.scores.data(), base + d, v_stride, held, s.sums.data() + d, dim);
    }
}

struct Strides { int64_t head, row; };

template <typename T>
static void attend(const T* q, Strides qs, const T* k, Strides ks, const T* v, Strides vs, T* out, float* lse,
                   int64_t heads, int64_t queries, int64_t tokens, int dim, float scale, const float* mask, int threads) {
    int64_t tiles = (queries + QUERY_TILE - 1) / QUERY_TILE;
    // Few heads and few queries leave threads without work: then the keys are split too.
    int64_t wanted = std::max<int64_t>(1, (4 * threads + heads * tiles - 1) / (heads * tiles));
    int64_t splits = std::clamp<int64_t>(tokens / 1024, 1, wanted);
    int64_t step = ((tokens + splits - 1) / splits + BLOCK - 1) / BLOCK * BLOCK;
    splits = (tokens + step - 1) / step;
    std::vector<float> sums(splits > 1 ? splits * heads * queries * dim : 0);
    std::vector<float> peaks(splits > 1 ? splits * heads * queries : 0), masses(peaks.size());
    int64_t tasks = heads * tiles * splits;

#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        Scratch s(dim);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) {
            int64_t split = task % splits, tile = task / splits % tiles, head = task / splits / tiles;
            int64_t row = tile * QUERY_TILE;
            int count = int(std::min<int64_t>(QUERY_TILE, queries - row));
            attend_tile(q + head * qs.head + row * qs.row, qs.row, count, k + head * ks.head, ks.row, v + head * vs.head,
                        vs.row, split * step, std::min(tokens, (split + 1) * step), dim, scale,
                        mask ? mask + row * tokens : nullptr, tokens, s);
            for (int r = 0; r < count; ++r) {
                int64_t at = head * queries + row + r;
                float mass = s.total_mass(r);
                if (splits > 1) {
                    int64_t part = split * heads * queries + at;
                    std::copy_n(&s.sums[r * dim], dim, &sums[part * dim]);
                    peaks[part] = s.peak[r];
                    masses[part] = mass;
                } else {
                    for (int d = 0; d < dim; ++d) narrow(s.sums[r * dim + d] / mass, out + at * dim + d);
                    lse[at] = (s.peak[r] + std::log2(mass)) * LN2;
                }
            }
        }
    }
    if (splits == 1) return;
    int64_t rows = heads * queries;
    std::vector<float> total(dim);
    for (int64_t at = 0; at < rows; ++at) {
        float peak = -std::numeric_limits<float>::infinity(), mass = 0.0f;
        for (int64_t split = 0; split < splits; ++split) peak = std::max(peak, peaks[split * rows + at]);
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t split = 0; split < splits; ++split) {
            int64_t part = split * rows + at;
            if (masses[part] == 0.0f) continue;
            float weight = std::exp2(peaks[part] - peak);
            mass += weight * masses[part];
            for (int d = 0; d < dim; ++d) total[d] += weight * sums[part * dim + d];
        }
        for (int d = 0; d < dim; ++d) narrow(total[d] / mass, out + at * dim + d);
        lse[at] = (peak + std::log2(mass)) * LN2;
    }
}

extern "C" {

// Strides in elements; out [heads, queries, dim] and lse [heads, queries] are contiguous, mask [queries, tokens].
void offload_rt_attend_float32(const float* q, int64_t q_head, int64_t q_row, const float* k, int64_t k_head, int64_t k_row,
                               const float* v, int64_t v_head, int64_t v_row, float* out, float* lse, int64_t heads,
                               int64_t queries, int64_t tokens, int64_t dim, float scale, const float* mask, int64_t threads) {
    attend<float>(q, {q_head, q_row}, k, {k_head, k_row}, v, {v_head, v_row}, out, lse, heads, queries, tokens, int(dim),
                  scale, mask, int(threads));
}

void offload_rt_attend_bfloat16(const BFloat16* q, int64_t q_head, int64_t q_row, const BFloat16* k, int64_t k_head,
                                int64_t k_row, const BFloat16* v, int64_t v_head, int64_t v_row, BFloat16* out, float* lse,
                                int64_t heads, int64_t queries, int64_t tokens, int64_t dim, float scale, const float* mask,
                                int64_t threads) {
    attend<BFloat16>(q, {q_head, q_row}, k, {k_head, k_row}, v, {v_head, v_row}, out, lse, heads, queries, tokens, int(dim),
                     scale, mask, int(threads));
}

int64_t offload_rt_lanes() { return LANES; }
}
