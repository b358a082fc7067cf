// How the work of paged attention is cut into pieces for threads. See paged_attention.h.
#pragma once

#include <numeric>
#include <vector>

#include "attention_arguments.h"
#include "attention_tile.h"

namespace cbatch {

constexpr long TILE_ROWS = 63;
constexpr long TILES_PER_THREAD = 8;      // that single tokens make at least: they take different times
constexpr long MIN_PARTS_PER_THREAD = 4;  // else tiles are cut into parts

// Query tokens with the heads of a KV head: consecutive ones of a prompt, or any of sequences with one token each.
struct Tile {
    long prompt;          // the sequence; or -1
    long first_token;     // of the prompt's
    const long *singles;  // or null; these tokens are the numbers of their sequences too
    long num_tokens, kv_head;

    long token(long i) const { return singles ? singles[i] : first_token + i; }
    long sequence(long i) const { return singles ? singles[i] : prompt; }
};

// A tile, or what its rows see of the positions `from` to `to` - 1.
struct Part {
    size_t tile;  // its number
    bool whole;
    long from, to;
};

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

inline long context_start(const AttentionArguments &a, long sequence) {
    return a.context_starts ? a.context_starts[sequence] : 0;
}

inline long context_end(const AttentionArguments &a, long sequence) {
    return context_start(a, sequence) + a.context_lens[sequence];
}

// The position of a query token of a sequence, and of the first key that it sees.
inline long position_of(const AttentionArguments &a, long sequence, long token) {
    return context_end(a, sequence) - a.cu_seqlens_q[sequence + 1] + token;
}

inline long first_seen(const AttentionArguments &a, long sequence, long position) {
    long start = context_start(a, sequence);
    return a.window ? std::max<long>(start, position - a.window + 1) : start;
}

// Up to which position two sequences lie in the same pages, in whole blocks.
inline long common_end(const AttentionArguments &a, long one, long other) {
    if (a.window || context_start(a, one) != context_start(a, other)) return 0;
    long most = std::min(a.context_lens[one], a.context_lens[other]) / a.page_size, pages = 0;
    const int32_t *tables[] = {a.block_tables + one * a.table_stride, a.block_tables + other * a.table_stride};
    while (pages < most && tables[0][pages] == tables[1][pages]) pages++;
    return (context_start(a, one) + pages * a.page_size) / BLOCK * BLOCK;
}

// Order the sequences with a single token such that those that begin with the same pages follow one another. Pages are
// looked at further and further apart: whoever shares one shares all before it.
inline std::vector<long> order_singles(const AttentionArguments &a) {
    std::vector<long> order(a.num_decode_rows);
    std::iota(order.begin(), order.end(), 0L);
    if (a.window) return order;
    std::stable_sort(order.begin(), order.end(), [&](long one, long other) {
        long num_pages[] = {a.context_lens[one] / a.page_size, a.context_lens[other] / a.page_size};
        const int32_t *tables[] = {a.block_tables + one * a.table_stride, a.block_tables + other * a.table_stride};
        long page = 0;
        for (; page < num_pages[0] && page < num_pages[1]; page = 2 * page + 1)
            if (tables[0][page] != tables[1][page]) return tables[0][page] < tables[1][page];
        return page >= num_pages[0] && page < num_pages[1];
    });
    return order;
}

// Cut the batch into tiles. `singles` is the order of the sequences with a single token, which tiles point into.
inline std::vector<Tile> cut_into_tiles(const AttentionArguments &a, const std::vector<long> &singles) {
    std::vector<Tile> tiles;
    long most = std::max<long>(1, TILE_ROWS / (a.num_heads / a.kv_heads));
    for (long prompt = a.num_decode_rows; prompt < a.num_sequences; prompt++)
        for (long token = a.cu_seqlens_q[prompt], end = a.cu_seqlens_q[prompt + 1]; token < end; token += most)
            tiles.push_back({prompt, token, nullptr, std::min(most, end - token), 0});
    long even = a.num_decode_rows * a.kv_heads / (TILES_PER_THREAD * a.num_threads);
    most = std::max<long>(1, std::min(most, even));
    for (long row = 0; row < a.num_decode_rows; row += most)
        tiles.push_back({-1, 0, &singles[row], std::min<long>(most, a.num_decode_rows - row), 0});
    // All tiles of a KV head before the next one's: sequences of a job often share pages.
    size_t count = tiles.size();
    for (long head = 1; head < a.kv_heads; head++)
        for (size_t i = 0; i < count; i++) {
            tiles.push_back(tiles[i]);
            tiles.back().kv_head = head;
        }
    return tiles;
}

// Cut tiles of one sequence into spans, where tiles are few and contexts long. The parts of a tile follow one another.
inline std::vector<Part> cut_into_parts(const AttentionArguments &a, const std::vector<Tile> &tiles) {
    bool few = a.num_threads > 1 && static_cast<long>(tiles.size()) < MIN_PARTS_PER_THREAD * a.num_threads;
    std::vector<Part> parts;
    for (size_t i = 0; i < tiles.size(); i++) {
        const Tile &tile = tiles[i];
        long from = first_seen(a, tile.sequence(0), position_of(a, tile.sequence(0), tile.token(0)));
        long to = position_of(a, tile.sequence(0), tile.token(tile.num_tokens - 1)) + 1;
        if (few && (tile.prompt >= 0 || tile.num_tokens == 1) && to - from > SPAN)
            for (from = from / SPAN * SPAN; from < to; from += SPAN)
                parts.push_back({i, false, from, std::min(from + SPAN, to)});
        else
            parts.push_back({i, true, from, to});
    }
    return parts;
}

}  // namespace cbatch
