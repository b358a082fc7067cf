// Paged attention of a ragged batch, decode rows and prompts in one call. See ../paged_attention.py.
//
// The work is cut into tiles: some query tokens with all heads of one KV head. A tile's rows walk over the blocks of
// keys together (attention_tile.h), so each key is fetched once for all of them. Tokens of a prompt share their whole
// context; single tokens of sequences that begin with the same pages share these, and then go on alone. The order in
// which a row's numbers are added up is the same in any tile: neither the batch nor the number of threads changes a bit
// of a result.
//
// One .cpp each instantiates it for a type of element: they are compiled side by side.
#pragma once

#include <vector>

#include "attention_tile.h"
#include "parallel.h"

namespace cbatch {

struct AttentionArguments {  // as in ../compiled_attention.py; strides count elements: of pages, heads and slots
    const void *query;
    int64_t query_token_stride, query_head_stride;
    void *result;  // [num_tokens, num_heads, head_dim]
    const void *keys, *values;
    int64_t key_strides[3], value_strides[3];
    const int32_t *cu_seqlens_q, *context_lens;
    const int32_t *context_starts;  // or null: all zero
    const int32_t *block_tables;
    int64_t table_stride;
    const float *sinks;  // [num_heads], or null
    int64_t num_sequences, num_decode_rows, num_query_tokens, num_tokens;
    int64_t num_heads, kv_heads, head_dim, page_size;
    int64_t window;  // 0: none
    int64_t num_threads;
    float scaling, softcap;  // softcap 0: none
};

constexpr long TILE_ROWS = 63;
constexpr long TILES_PER_THREAD = 8;  // at least, where there is work enough: they take different times

// Query tokens with the heads of a KV head: of one prompt, or of sequences with a single token each.
struct Tile {
    long first_token, end_token, kv_head;
    long prompt;  // the sequence, or -1
};

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

inline long context_start(const AttentionArguments &a, long sequence) {
    return a.context_starts ? a.context_starts[sequence] : 0;
}

inline long context_end(const AttentionArguments &a, long sequence) {
    return context_start(a, sequence) + a.context_lens[sequence];
}

// Up to which position two sequences lie in the same pages, in whole blocks.
inline long common_end(const AttentionArguments &a, long one, long other) {
    if (a.window || context_start(a, one) != context_start(a, other)) return 0;
    long most = std::min(a.context_lens[one], a.context_lens[other]) / a.page_size, pages = 0;
    const int32_t *tables[] = {a.block_tables + one * a.table_stride, a.block_tables + other * a.table_stride};
    while (pages < most && tables[0][pages] == tables[1][pages]) pages++;
    return (context_start(a, one) + pages * a.page_size) / BLOCK * BLOCK;
}

inline std::vector<Tile> cut_into_tiles(const AttentionArguments &a) {
    std::vector<Tile> tiles;
    long most = std::max<long>(1, TILE_ROWS / (a.num_heads / a.kv_heads));
    for (long prompt = a.num_decode_rows; prompt < a.num_sequences; prompt++)
        for (long token = a.cu_seqlens_q[prompt], end = a.cu_seqlens_q[prompt + 1]; token < end; token += most)
            tiles.push_back({token, std::min(token + most, end), 0, prompt});
    long even = a.num_decode_rows * a.kv_heads / (TILES_PER_THREAD * a.num_threads);
    most = std::max<long>(1, std::min(most, even));
    for (long row = 0; row < a.num_decode_rows; row += most)
        tiles.push_back({row, std::min<long>(row + most, a.num_decode_rows), 0, -1});
    // All tiles of a KV head before the next one's: sequences of a job often share pages.
    size_t count = tiles.size();
    for (long head = 1; head < a.kv_heads; head++)
        for (size_t i = 0; i < count; i++) {
            tiles.push_back(tiles[i]);
            tiles.back().kv_head = head;
        }
    return tiles;
}

// Rows of a tile to attend to what they see of the positions `from` to `to` - 1, which lie in one block.
struct Step {
    long first_row, count, sequence, from, to;
};

// A thread's own memory, which is kept from call to call.
struct Workspace {
    std::vector<float> floats;
    std::vector<long> bounds;
    std::vector<Step> steps;

    Rows rows(long count, long row_size) {
        floats.resize(std::max<size_t>(floats.size(), count * (2 * row_size + 2)));
        bounds.resize(std::max<size_t>(bounds.size(), 2 * count));
        float *query = floats.data(), *sums = query + count * row_size, *highest = sums + count * row_size;
        return {query, sums, highest, highest + count, bounds.data(), bounds.data() + count};
    }
};

template <class Element>
class TileAttention {
  public:
    TileAttention(const AttentionArguments &arguments, const Tile &tile, Workspace &workspace)
        : a(arguments), tile(tile), group(a.num_heads / a.kv_heads), steps(workspace.steps) {
        layout = {a.head_dim, ceil_div(a.head_dim, WIDTH) * WIDTH, a.key_strides[2], a.value_strides[2],
                  a.softcap * LOG2_E};
        rows = workspace.rows((tile.end_token - tile.first_token) * group, layout.row_size);
    }

    void run() {
        for (long token = tile.first_token; token < tile.end_token; token++) begin(token);
        steps.clear();
        if (tile.prompt >= 0)
            plan(tile.first_token, tile.end_token, tile.prompt, 0, context_end(a, tile.prompt));
        else
            for (long token = tile.first_token; token < tile.end_token;) token = plan_together(token);
        attend();
        for (long token = tile.first_token; token < tile.end_token; token++) finish(token);
    }

  private:
    // Set the state of a token's rows to where nothing was seen but the sinks.
    void begin(long token) {
        long sequence = tile.prompt < 0 ? token : tile.prompt;
        long start = context_start(a, sequence);
        long position = context_end(a, sequence) - a.cu_seqlens_q[sequence + 1] + token;
        float unit = a.scaling * (a.softcap ? 2 * LOG2_E / a.softcap : LOG2_E);
        for (long i = 0; i < group; i++) {
            long head = tile.kv_head * group + i;
            Rows row = rows_of(token, i);
            auto *query = static_cast<const Element *>(a.query);
            query += token * a.query_token_stride + head * a.query_head_stride;
            long d = 0;
            for (; d + WIDTH <= a.head_dim; d += WIDTH) store(row.query + d, load(query + d) * unit);
            if (d < a.head_dim) store(row.query + d, load<WIDTH / 2>(query + d) * unit);
            std::fill_n(row.sums, layout.row_size, 0.0f);
            *row.highest = a.sinks ? a.sinks[head] * LOG2_E : -INFINITE;
            *row.total = a.sinks ? 1.0f : 0.0f;
            *row.begin = a.window ? std::max<long>(start, position - a.window + 1) : start;
            *row.end = position + 1;
        }
    }

    // Plan for single tokens from `token` on as long as their sequences begin alike: what is common in common, and then
    // for each alone. Returns the first token that was left out.
    long plan_together(long token) {
        long end = token + 1, common_to = context_end(a, token);
        for (; end < tile.end_token; end++) {
            long common = common_end(a, end - 1, end);
            if (common == 0 || common < common_to / 2) break;
            common_to = std::min(common_to, common);
        }
        plan(token, end, token, 0, common_to);
        for (; token < end; token++) plan(token, token + 1, token, common_to, context_end(a, token));
        return end;
    }

    // Plan for some tokens' rows to attend to what they see of a sequence's positions `from` to `to` - 1.
    void plan(long first_token, long end_token, long sequence, long from, long to) {
        Rows some = rows_of(first_token);
        long count = (end_token - first_token) * group;
        from = std::max(from, *std::min_element(some.begin, some.begin + count));
        to = std::min(to, *std::max_element(some.end, some.end + count));
        for (long block_end; from < to; from = block_end) {
            block_end = std::min(from / BLOCK * BLOCK + BLOCK, to);
            steps.push_back({(first_token - tile.first_token) * group, count, sequence, from, block_end});
        }
    }

    void attend() {
        Segment<Element> segments[2][BLOCK];
        int num_segments = locate(steps[0], segments[0]);
        for (size_t i = 0; i < steps.size(); i++) {
            const Step &step = steps[i];
            Ahead ahead;
            auto *now = segments[i % 2], *then = segments[1 - i % 2];
            int num_next = i + 1 < steps.size() ? locate(steps[i + 1], then) : 0;
            for (int s = 0; s < num_next; s++) {
                ahead.add(then[s].keys, then[s].count * layout.key_stride * sizeof(Element));
                ahead.add(then[s].values, then[s].count * layout.value_stride * sizeof(Element));
            }
            attend_block(rows.from(step.first_row, layout.row_size), step.count, step.from / BLOCK * BLOCK, now,
                         num_segments, layout, ahead);
            num_segments = num_next;
        }
    }

    // Find the keys and values of a step.
    int locate(const Step &step, Segment<Element> *segments) const {
        long start = context_start(a, step.sequence);
        long page = (step.from - start) / a.page_size, slot = (step.from - start) % a.page_size;
        const int32_t *table = a.block_tables + step.sequence * a.table_stride;
        auto *keys = static_cast<const Element *>(a.keys) + tile.kv_head * a.key_strides[1];
        auto *values = static_cast<const Element *>(a.values) + tile.kv_head * a.value_strides[1];
        int count = 0;
        for (long at = step.from; at < step.to; page++, slot = 0) {
            long number = table[page], length = std::min<long>(a.page_size - slot, step.to - at);
            segments[count++] = {keys + number * a.key_strides[0] + slot * a.key_strides[2],
                                 values + number * a.value_strides[0] + slot * a.value_strides[2],
                                 static_cast<int>(at % BLOCK), static_cast<int>(length)};
            at += length;
        }
        return count;
    }

    void finish(long token) {
        for (long i = 0; i < group; i++) {
            Rows row = rows_of(token, i);
            auto *result = static_cast<Element *>(a.result);
            result += (token * a.num_heads + tile.kv_head * group + i) * a.head_dim;
            Floats total = splat(*row.total);
            long d = 0;
            for (; d + WIDTH <= a.head_dim; d += WIDTH) store(result + d, load(row.sums + d) / total);
            if (d < a.head_dim) store<WIDTH / 2>(result + d, load(row.sums + d) / total);
        }
    }

    Rows rows_of(long token, long i = 0) const {
        return rows.from((token - tile.first_token) * group + i, layout.row_size);
    }

    const AttentionArguments &a;
    const Tile &tile;
    long group;
    std::vector<Step> &steps;
    Layout layout;
    Rows rows;
};

template <class Element>
void attend_batch(const AttentionArguments &a) {
    std::vector<Tile> tiles = cut_into_tiles(a);
    parallel_for(tiles.size(), 1, a.num_threads, [&](long i) {
        thread_local Workspace workspace;
        TileAttention<Element>(a, tiles[i], workspace).run();
    });
    auto *result = static_cast<Element *>(a.result);
    long row_size = a.num_heads * a.head_dim;
    long num_padding = a.num_tokens - a.num_query_tokens;
    std::memset(result + a.num_query_tokens * row_size, 0, num_padding * row_size * sizeof(Element));
}

}  // namespace cbatch
