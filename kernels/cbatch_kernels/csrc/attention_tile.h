// Attends rows (a query token's head each) to one block of BLOCK keys: scores, online softmax, weighted sum of values.
//
// What a row gets does not depend on the rows beside it. Blocks begin at multiples of BLOCK, in positions of the
// sequence; a score is a sum over the head in one order; a block's weights are added up lane by lane, and values key by
// key; what SPAN keys gave is added to what the spans before them gave. A key that a row does not see weighs exactly
// zero, so it makes no difference whether it was looked at.
//
// The scores are logarithms to base 2: queries come multiplied by what that takes (see paged_attention.h).
#pragma once

#include <algorithm>

#include "simd.h"

namespace cbatch {

constexpr int BLOCK = 64;
constexpr int SPAN = 8 * BLOCK;
constexpr int HEAD_MULTIPLE = 8;                       // of every head's size; wider vectors have a half left over
constexpr int KEYS = 4;                                // whose scores are summed at a time
constexpr int MAX_ROWS = NUM_REGISTERS == 32 ? 6 : 3;  // that share each load; MAX_ROWS * KEYS sums stay in registers
constexpr float MAX_EXPONENT = 60.0f;                  // beyond which tanh is 1

// Keys and values that lie one after another; `first` is the first one's place in the block.
template <class Element>
struct Segment {
    const Element *keys, *values;
    int first, count;
};

struct Layout {
    long head_dim, row_size;        // floats; row_size is head_dim filled up with zeros to whole vectors
    long key_stride, value_stride;  // elements from one slot of a page to the next
    float softcap;                  // in the unit of the scores; 0 for none
};

// What rows have added up so far.
struct State {
    float *sums;             // [rows][row_size]: of weighted values
    float *highest, *total;  // [rows]: the highest score, and the sum of weights relative to it

    State from(long row, long row_size) const { return {sums + row * row_size, highest + row, total + row}; }

    static long size(long count, long row_size) { return count * (row_size + 2); }

    static State in(float *memory, long count, long row_size) {
        float *highest = memory + count * row_size;
        return {memory, highest, highest + count};
    }
};

// Rows, each of which sees the keys at positions begin to end - 1.
struct Rows {
    float *query;       // [rows][row_size]
    long *begin, *end;  // [rows]
    State state;        // of the span that is being worked on

    Rows from(long row, long row_size) const {
        return {query + row * row_size, begin + row, end + row, state.from(row, row_size)};
    }
};

// Set rows to where nothing was seen.
inline void clear(State state, long count, long row_size) {
    std::fill_n(state.sums, count * row_size, 0.0f);
    std::fill_n(state.highest, count, -INFINITE);
    std::fill_n(state.total, count, 0.0f);
}

// Add what rows have seen in a span to what they had seen before it.
inline void fold(State before, State span, long count, long row_size) {
    for (long row = 0; row < count; row++) {
        if (span.total[row] == 0.0f) continue;
        float raised = std::max(before.highest[row], span.highest[row]);
        Floats base = splat(raised == -INFINITE ? 0.0f : raised);
        float scale = exp2(splat(before.highest[row]) - base)[0];
        Floats span_scale = exp2(splat(span.highest[row]) - base);
        for (long d = row * row_size; d < (row + 1) * row_size; d += WIDTH)
            store(before.sums + d, fma(load(span.sums + d), span_scale, load(before.sums + d) * scale));
        before.total[row] = before.total[row] * scale + span.total[row] * span_scale[0];
        before.highest[row] = raised;
    }
}

// Memory to be fetched while the block before it is worked on: as many lines at a time as are read meanwhile.
class Ahead {
  public:
    void add(const void *from, long bytes) {
        auto *at = static_cast<const char *>(from);
        runs[count++] = {at, at + bytes};
    }

    void fetch(long bytes) {
        for (; bytes > 0; bytes -= LINE) {
            if (at >= end) {
                if (next == count) return;
                at = runs[next].from, end = runs[next++].end;
            }
            __builtin_prefetch(at, 0, 2);  // into the second cache: a block is as large as the first
            at += LINE;
        }
    }

  private:
    static constexpr long LINE = 64;
    struct Run {
        const char *from, *end;
    };
    Run runs[2 * BLOCK];
    int count = 0, next = 0;
    const char *at = nullptr, *end = nullptr;
};

// Scores [M][BLOCK] of M rows with K keys.
template <int M, int K, class Element>
inline void score(const float *query, const Element *keys, const Layout &layout, float *scores) {
    Floats sum_of[M][K] = {};
    long d = 0;
    for (; d + WIDTH <= layout.head_dim; d += WIDTH) {
        Floats part[M];
        for (int m = 0; m < M; m++) part[m] = load(query + m * layout.row_size + d);
        for (int k = 0; k < K; k++) {
            Floats key = load(keys + k * layout.key_stride + d);
            for (int m = 0; m < M; m++) sum_of[m][k] = fma(part[m], key, sum_of[m][k]);
        }
    }
    if (WIDTH > HEAD_MULTIPLE && d < layout.head_dim)
        for (int k = 0; k < K; k++) {
            Floats key = load<WIDTH / 2>(keys + k * layout.key_stride + d);
            for (int m = 0; m < M; m++)
                sum_of[m][k] = fma(load(query + m * layout.row_size + d), key, sum_of[m][k]);
        }
    for (int m = 0; m < M; m++) {
        if constexpr (K == 4) {
            Quad four = sums(sum_of[m][0], sum_of[m][1], sum_of[m][2], sum_of[m][3]);
            std::memcpy(scores + m * BLOCK, &four, sizeof four);
        } else {
            scores[m * BLOCK] = sum(sum_of[m][0]);
        }
    }
}

inline Floats cap(Floats x, float softcap) {
    x = larger(splat(-MAX_EXPONENT), -larger(splat(-MAX_EXPONENT), -x));
    Floats power = exp2(x);
    return (power - 1.0f) / (power + 1.0f) * softcap;
}

// The highest lane.
inline float highest(Floats x) {
    Quad parts[WIDTH / 4];
    std::memcpy(parts, &x, sizeof parts);
    for (int i = 1; i < WIDTH / 4; i++) parts[0] = parts[0] > parts[i] ? parts[0] : parts[i];
    return std::max(std::max(parts[0][0], parts[0][1]), std::max(parts[0][2], parts[0][3]));
}

// Turn the scores first to last - 1 of M rows into weights, and update their states. `scales` get what the sums so far
// are to be multiplied by.
template <int M>
inline void soften(float *scores, int first, int last, Rows rows, long block_start, float softcap, float *scales) {
    first = first / WIDTH * WIDTH;
    int see_from[M], see_to[M];
    bool see_all = true;
    for (int m = 0; m < M; m++) {
        see_from[m] = static_cast<int>(std::max(rows.begin[m] - block_start, 0L));
        see_to[m] = static_cast<int>(std::min<long>(rows.end[m] - block_start, BLOCK));
        see_all = see_all && see_from[m] <= first && see_to[m] == BLOCK;
    }
    Floats top[M], base[M], total[M] = {};
    for (int m = 0; m < M; m++) top[m] = splat(-INFINITE);
    for (int i = first; i < last; i += WIDTH)
        for (int m = 0; m < M; m++) {
            Floats x = load(scores + m * BLOCK + i);
            if (softcap != 0.0f) x = cap(x, softcap);
            if (!see_all) {
                Ints lanes = iota() + i;
                x = select((lanes >= see_from[m]) & (lanes < see_to[m]), x, splat(-INFINITE));
            }
            if (softcap != 0.0f || !see_all) store(scores + m * BLOCK + i, x);
            top[m] = larger(x, top[m]);
        }
    for (int m = 0; m < M; m++) {
        float raised = std::max(rows.state.highest[m], highest(top[m]));
        // Nothing seen yet: any finite number keeps the weights at zero.
        base[m] = splat(raised == -INFINITE ? 0.0f : raised);
        scales[m] = exp2(splat(rows.state.highest[m]) - base[m])[0];
        rows.state.highest[m] = raised;
    }
    for (int i = first; i < last; i += WIDTH)
        for (int m = 0; m < M; m++) {
            Floats weight = exp2(load(scores + m * BLOCK + i) - base[m]);
            store(scores + m * BLOCK + i, weight);
            total[m] += weight;
        }
    for (int m = 0; m < M; m++) rows.state.total[m] = rows.state.total[m] * scales[m] + sum(total[m]);
}

// Multiply N vectors of M rows' sums by `scales`, and add the values of keys first to last - 1 by their weights.
template <int M, int N, int count, class Element>
inline void weigh(float *sums, const float *weights, const float *scales, const Segment<Element> *segments,
                  int num_segments, int first, int last, const Layout &layout, long d, Ahead &ahead) {
    Floats sum_of[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum_of[m][n] = load(sums + m * layout.row_size + n * WIDTH) * scales[m];
    for (int s = 0; s < num_segments; s++) {
        const Segment<Element> &segment = segments[s];
        int end = std::min(segment.first + segment.count, last), i = std::max(segment.first, first);
        const Element *value = segment.values + (i - segment.first) * layout.value_stride + d;
        for (int stop; i < end; i = stop) {
            stop = std::min(i + KEYS, end);
            ahead.fetch(KEYS * N * WIDTH * sizeof(Element));
            for (int k = i; k < stop; k++, value += layout.value_stride) {
                Floats weight[M];
                for (int m = 0; m < M; m++) weight[m] = splat(weights[m * BLOCK + k]);
                for (int n = 0; n < N; n++) {
                    Floats part = load<count>(value + n * WIDTH);
                    for (int m = 0; m < M; m++) sum_of[m][n] = fma(weight[m], part, sum_of[m][n]);
                }
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(sums + m * layout.row_size + n * WIDTH, sum_of[m][n]);
}

// The same for whole rows from element d on, N vectors at a time as long as there are so many.
template <int M, int N, class Element>
inline void weigh_rows(float *sums, const float *weights, const float *scales, const Segment<Element> *segments,
                       int num_segments, int first, int last, const Layout &layout, long d, Ahead &ahead) {
    for (; d + N * WIDTH <= layout.head_dim; d += N * WIDTH)
        weigh<M, N, WIDTH>(sums + d, weights, scales, segments, num_segments, first, last, layout, d, ahead);
    if constexpr (N > 1)
        weigh_rows<M, N == 8 ? 4 : 1>(sums, weights, scales, segments, num_segments, first, last, layout, d, ahead);
    else if (WIDTH > HEAD_MULTIPLE && d < layout.head_dim)
        weigh<M, 1, WIDTH / 2>(sums + d, weights, scales, segments, num_segments, first, last, layout, d, ahead);
}

template <int M, class Element>
void attend_few(Rows rows, long block_start, const Segment<Element> *segments, int num_segments, const Layout &layout,
                Ahead &ahead) {
    long begin = *std::min_element(rows.begin, rows.begin + M), end = *std::max_element(rows.end, rows.end + M);
    int first = static_cast<int>(std::max(begin - block_start, 0L));
    int last = static_cast<int>(std::min<long>(end - block_start, BLOCK));
    if (first >= last) return;
    alignas(64) float scores[M * BLOCK];
    for (int s = 0; s < num_segments; s++) {
        const Segment<Element> &segment = segments[s];
        int stop = std::min(segment.first + segment.count, last), i = std::max(segment.first, first);
        const Element *keys = segment.keys + (i - segment.first) * layout.key_stride;
        for (; i + KEYS <= stop; i += KEYS, keys += KEYS * layout.key_stride) {
            ahead.fetch(KEYS * layout.head_dim * sizeof(Element));
            score<M, KEYS>(rows.query, keys, layout, scores + i);
        }
        for (; i < stop; i++, keys += layout.key_stride) score<M, 1>(rows.query, keys, layout, scores + i);
    }
    float scales[M];
    soften<M>(scores, first, last, rows, block_start, layout.softcap, scales);
    constexpr int N = M == 1 ? 8 : 4;
    weigh_rows<M, N>(rows.state.sums, scores, scales, segments, num_segments, first, last, layout, 0, ahead);
}

// Attend `count` rows to the keys of one block; `segments` hold all that any of them sees of it.
template <class Element>
void attend_block(Rows rows, long count, long block_start, const Segment<Element> *segments, int num_segments,
                  const Layout &layout, Ahead &ahead) {
    long num_groups = (count + MAX_ROWS - 1) / MAX_ROWS;
    for (long group = 0, row = 0; group < num_groups; group++) {
        int size = static_cast<int>((count - row) / (num_groups - group));
        Rows few = rows.from(row, layout.row_size);
        row += size;
        switch (size) {
            case 1: attend_few<1>(few, block_start, segments, num_segments, layout, ahead); break;
            case 2: attend_few<2>(few, block_start, segments, num_segments, layout, ahead); break;
            case 3: attend_few<3>(few, block_start, segments, num_segments, layout, ahead); break;
#define CBATCH_CASE(M) \
    case M: \
        if constexpr (M <= MAX_ROWS) attend_few<M>(few, block_start, segments, num_segments, layout, ahead); \
        break;
            CBATCH_CASE(4)
            CBATCH_CASE(5)
            CBATCH_CASE(6)
        }
    }
}

}  // namespace cbatch
