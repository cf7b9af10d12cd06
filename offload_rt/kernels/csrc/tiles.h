// Products of bfloat16 by the processor's tiles (AMX): a tile of weights is 16 rows of 32 entries as they lie in
// memory, a tile of inputs 16 pairs of entries of up to 16 rows, so inputs are laid out pair by pair.

#pragma once

#include "bf16_dots.h"

#if defined(OFFLOAD_RT_BF16_DOTS) && defined(__AMX_BF16__) && defined(__linux__)
#define OFFLOAD_RT_BF16_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "vectors.h"

// Whether this process may use tiles; Linux wants to be asked, as they make the state of a thread larger.
static const bool TILES_GRANTED = [] {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}();

constexpr int TILE_ROWS = 16;                // of weights, and of inputs
constexpr int TILE_ENTRIES = 2 * TILE_ROWS;  // of a row

// The tiles of a thread: 0 to 3 are sums of two tiles of weights with two of inputs, 4 and 5 weights, 6 and 7 inputs.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (outs_) _tile_release();
    }

    // Computes products of `outs` rows of weights, at most two tiles, with inputs [rows][width], to out [rows][stride].
    void multiply(const BFloat16* weights, int64_t weight_stride, int outs, const BFloat16* inputs, int rows, int64_t width,
                  float* out, int64_t stride) {
        for (int row = 0; row < rows; row += 2 * TILE_ROWS) {
            const int ins = std::min(2 * TILE_ROWS, rows - row);
            // One tile of inputs waits for memory: two tiles of weights beside each other would take longer.
            const int step = ins > TILE_ROWS ? 2 * TILE_ROWS : TILE_ROWS;
            for (int first = 0; first < outs; first += step) {
                const int some = std::min(outs - first, step);
                if (some != outs_ || ins != ins_) set_shapes(some, ins);
                const auto add = some > TILE_ROWS  ? &Tiles::add_products<2, 2>
                                 : ins > TILE_ROWS ? &Tiles::add_products<1, 2>
                                                   : &Tiles::add_products<1, 1>;
                (this->*add)(weights + first * weight_stride, weight_stride, inputs + row * width, width, out + row * stride + first,
                             stride);
            }
        }
    }

  private:
    // Sets the tiles for `outs` rows of weights and `ins` rows of inputs, at most two tiles of each.
    void set_shapes(int outs, int ins) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int tile = 0; tile < 8; ++tile) {
            const int of_weights = tile < 4 ? tile / 2 : tile - 4, of_inputs = tile < 4 ? tile % 2 : tile - 6;
            const int weights = std::min(outs - of_weights * TILE_ROWS, TILE_ROWS);
            const int inputs = std::min(ins - of_inputs * TILE_ROWS, TILE_ROWS);
            if ((tile < 6 && weights <= 0) || ((tile < 4 || tile >= 6) && inputs <= 0)) continue;
            shapes.rows[tile] = uint8_t(tile < 6 ? weights : TILE_ROWS);
            shapes.row_bytes[tile] = uint16_t(4 * (tile == 4 || tile == 5 ? TILE_ROWS : inputs));
        }
        __asm__ volatile("" : : "r"(&shapes) : "memory");  // the compiler takes the next line for a load of eight bytes
        _tile_loadconfig(&shapes);
        outs_ = outs, ins_ = ins;
    }

    // Multiplies A tiles of weights with B tiles of inputs. The processor prefetches better than instructions would.
    template <int A, int B>
    void add_products(const BFloat16* weights, int64_t weight_stride, const BFloat16* inputs, int64_t width, float* out, int64_t stride) const {
        const int64_t bytes = weight_stride * int64_t(sizeof *weights);
        const BFloat16 *second_weights = weights + TILE_ROWS * weight_stride, *second_inputs = inputs + TILE_ROWS * width;
        const int first = std::min(ins_, TILE_ROWS), second = ins_ - first;
        _tile_zero(0);
        if constexpr (B > 1) _tile_zero(1);
        if constexpr (A > 1) _tile_zero(2);
        if constexpr (A > 1 && B > 1) _tile_zero(3);
        for (int64_t k = 0; k < width; k += TILE_ENTRIES) {
            _tile_loadd(4, weights + k, bytes);
            if constexpr (A > 1) _tile_loadd(5, second_weights + k, bytes);
            _tile_loadd(6, inputs + k * first, 4 * first);
            if constexpr (B > 1) _tile_loadd(7, second_inputs + k * second, 4 * second);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (B > 1) _tile_dpbf16ps(1, 4, 7);
            if constexpr (A > 1) _tile_dpbf16ps(2, 5, 6);
            if constexpr (A > 1 && B > 1) _tile_dpbf16ps(3, 5, 7);
        }
        if (ins_ == 1) {
            _tile_stored(0, out, sizeof *out);
            return;
        }
        alignas(64) float sums[TILE_ROWS][TILE_ROWS];  // [outputs][inputs]
        _tile_stored(0, sums, sizeof *sums);
        store_turned(sums, first, out, stride);
        if constexpr (A > 1) {
            _tile_stored(2, sums, sizeof *sums);
            store_turned(sums, first, out + TILE_ROWS, stride);
        }
        if constexpr (B > 1) {
            _tile_stored(1, sums, sizeof *sums);
            store_turned(sums, second, out + TILE_ROWS * stride, stride);
        }
        if constexpr (A > 1 && B > 1) {
            _tile_stored(3, sums, sizeof *sums);
            store_turned(sums, second, out + TILE_ROWS * stride + TILE_ROWS, stride);
        }
    }

    static void store_turned(const float sums[TILE_ROWS][TILE_ROWS], int rows, float* out, int64_t stride) {
        Vec turned[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; ++i) turned[i] = load(sums[i]);
        transpose(turned);
        for (int r = 0; r < rows; ++r) store(out + r * stride, turned[r]);
    }

    int outs_ = 0, ins_ = 0;  // that the tiles are set for
};
#endif
