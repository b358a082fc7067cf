// Linear layers over packed weights, with what follows them. See ../packed_linear.py.
//
// Weights lie in panels of outputs, each panel one input after the other. A tile, some rows by one panel, stays in
// registers while all inputs are added up one by one: what a row gets does not depend on the others, to the bit. While
// the first tile of a panel is computed, the next panel is fetched into the second cache.

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "parallel.h"
#include "simd.h"

namespace {

using namespace cbatch;

enum Activation { NONE, SILU, GELU_TANH };

constexpr int PANEL = 2 * WIDTH;
constexpr int TILE_ROWS = NUM_REGISTERS == 32 ? 12 : 6;  // so that its sums and what they are made of fill the registers
constexpr int64_t BLOCK_ROWS = 8 * TILE_ROWS;            // whose inputs stay in the cache while panels go by
constexpr int64_t ROWS_PER_TASK = 4 * TILE_ROWS;         // by one panel; of few rows a task takes several panels
constexpr int64_t MAX_PANELS_PER_TASK = 4;
constexpr int64_t LINE = 16;  // floats

struct Tile {
    Floats sums[TILE_ROWS][2];
};

// Both halves of an input's weights.
inline void load_weights(const float *from, Floats &first, Floats &second) {
    first = load(from), second = load(from + WIDTH);
}

// Of bfloat16 their numbers lie in pairs: the halves are two instructions away, and no shuffle takes the products' place.
inline void load_weights(const BFloat16 *from, Floats &first, Floats &second) {
    Ints pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    first = (Floats)(pairs << 16), second = (Floats)(pairs & static_cast<int32_t>(0xffff0000));
}

// Where in an input's weights the i-th lies, so that `load_weights` finds it.
inline int64_t place_of(int64_t i, const float *) { return i; }
inline int64_t place_of(int64_t i, const BFloat16 *) { return i % WIDTH * 2 + i / WIDTH; }

template <int rows, class Weight>
void multiply(const float *x, int64_t stride, const Weight *panel, int64_t in_features, bool fetches, Tile &tile) {
    Floats sums[rows][2] = {};
    int64_t ahead = fetches ? in_features * PANEL : 0;
    for (int64_t k = 0; k < in_features; k++, panel += PANEL) {
        Floats first, second;
        load_weights(panel, first, second);
        __builtin_prefetch(panel + ahead, 0, 2);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            Floats input = splat(x[row * stride + k]);
            sums[row][0] = fma(input, first, sums[row][0]);
            sums[row][1] = fma(input, second, sums[row][1]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) tile.sums[row][half] = sums[row][half];
}

// `multiply` for a number of rows that is known only now.
template <int rows, class Weight>
void multiply_rows(int64_t count, const float *x, int64_t stride, const Weight *panel, int64_t in_features,
                   bool fetches, Tile &tile) {
    if constexpr (rows > 1)
        if (count < rows) return multiply_rows<rows - 1>(count, x, stride, panel, in_features, fetches, tile);
    multiply<rows>(x, stride, panel, in_features, fetches, tile);
}

// x * sigmoid(y), where e^-y may not overflow.
inline Floats scale_by_sigmoid(Floats x, Floats y) {
    Floats exponent = y * -LOG2_E;
    return x / (1.0f + exp2(select(exponent < 126.0f, exponent, splat(126.0f))));
}

inline Floats activate(Floats x, int64_t activation) {
    if (activation == SILU) return scale_by_sigmoid(x, x);
    if (activation == GELU_TANH) return scale_by_sigmoid(x, (x + x * x * x * 0.044715f) * 1.5957691216057308f);
    return x;
}

// WIDTH numbers of a row, or as many as it has left.
inline Floats load_columns(const float *from, int64_t left) {
    if (left >= WIDTH) return load(from);
    Floats x = {};
    for (int64_t i = 0; i < left; i++) x[i] = from[i];
    return x;
}

inline void store_columns(float *to, Floats x, int64_t left) {
    if (left >= WIDTH) return store(to, x);
    for (int64_t i = 0; i < left; i++) to[i] = x[i];
}

// Finish a tile's sums: bias, gate, residual.
void finish(const LinearArguments &a, const Tile &tile, const Tile &gated, int64_t row, int64_t rows, int64_t first_column) {
    for (int half = 0; half < 2; half++) {
        int64_t column = first_column + half * WIDTH, left = a.out_features - column;
        if (left <= 0) return;
        Floats bias = a.bias ? load_columns(a.bias + column, left) : Floats{};
        Floats gated_bias = a.bias && a.is_gated ? load_columns(a.bias + a.out_features + column, left) : Floats{};
        for (int64_t i = 0; i < rows; i++) {
            Floats y = activate(tile.sums[i][half] + bias, a.activation);
            if (a.is_gated) y = y * (gated.sums[i][half] + gated_bias);
            if (a.residual) y = y + load_columns(a.residual + (row + i) * a.residual_stride + column, left);
            store_columns(a.result + (row + i) * a.result_stride + column, y, left);
        }
    }
}

template <class Weight>
void run(const LinearArguments &a) {
    int64_t num_panels = (a.out_features + PANEL - 1) / PANEL, panel_size = a.in_features * PANEL;
    int64_t num_blocks = (a.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t grain = std::clamp<int64_t>(ROWS_PER_TASK / std::max<int64_t>(a.num_rows, 1), 1, MAX_PANELS_PER_TASK);
    parallel_for(num_panels * num_blocks, grain, a.num_threads, [&](long task) {
        int64_t panel = task % num_panels, row = task / num_panels * BLOCK_ROWS;
        int64_t end = row + BLOCK_ROWS < a.num_rows ? row + BLOCK_ROWS : a.num_rows;
        auto *weight = static_cast<const Weight *>(a.weight) + panel * panel_size;
        bool fetches = true;
        for (int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--, fetches = false) {
            int64_t rows = (end - row + tiles - 1) / tiles;  // about as many for all: a tile of few wastes most
            auto *x = a.x + row * a.x_stride;
            Tile tile, gated;
            multiply_rows<TILE_ROWS>(rows, x, a.x_stride, weight, a.in_features, fetches, tile);
            if (a.is_gated) {
                auto *other = weight + num_panels * panel_size;
                multiply_rows<TILE_ROWS>(rows, x, a.x_stride, other, a.in_features, fetches, gated);
            }
            finish(a, tile, gated, row, rows, panel * PANEL);
            row += rows;
        }
    });
}

inline void narrow(float x, float *to) { *to = x; }

inline void narrow(float x, BFloat16 *to) {  // which holds it exactly
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to->bits = static_cast<uint16_t>(bits >> 16);
}

// Copy a weight [out_features, in_features] into panels, the last one filled up with zeros.
template <class Weight>
void pack(const float *weight, int64_t out_features, int64_t in_features, Weight *panels, int64_t num_threads) {
    int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    parallel_for(num_panels, MAX_PANELS_PER_TASK, num_threads, [&](long panel) {
        int64_t first = panel * PANEL, count = first + PANEL < out_features ? PANEL : out_features - first;
        const float *from = weight + first * in_features;
        Weight *to = panels + first * in_features;
        for (int64_t start = 0; start < in_features; start += LINE)  // lines of all rows, while they are in the cache
            for (int64_t i = 0; i < PANEL; i++)
                for (int64_t k = start, end = start + LINE < in_features ? start + LINE : in_features; k < end; k++)
                    narrow(i < count ? from[i * in_features + k] : 0.0f, to + k * PANEL + place_of(i, to));
    });
}

}  // namespace

CBATCH_API int64_t cbatch_linear_panel() { return PANEL; }

// Whether bfloat16 holds numbers exactly: their lower halves are zero.
CBATCH_API int64_t cbatch_is_bfloat16(const uint32_t *numbers, int64_t count) {
    uint32_t lower = 0;
    for (int64_t i = 0; i < count; i++) lower |= numbers[i] & 0xffff;
    return lower == 0;
}

CBATCH_API void cbatch_linear_pack(const float *weight, int64_t out_features, int64_t in_features, void *panels,
                                   int64_t is_bfloat16, int64_t num_threads) {
    if (is_bfloat16)
        pack(weight, out_features, in_features, static_cast<BFloat16 *>(panels), num_threads);
    else
        pack(weight, out_features, in_features, static_cast<float *>(panels), num_threads);
}

void cbatch_linear(const cbatch::LinearArguments *arguments) {
    if (arguments->is_bfloat16)
        run<BFloat16>(*arguments);
    else
        run<float>(*arguments);
}
