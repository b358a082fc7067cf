// Paged attention of a ragged batch, decode rows and prompts in one call. See ../paged_attention.py.
//
// The work is cut into tiles: some query tokens with all heads of one KV head. A tile's rows walk over the blocks of
// keys together (attention_tile.h), so each key is fetched once for all of them. Tokens of a prompt share their whole
// context; single tokens of sequences that begin with the same pages share these, and then go on alone. Where there are
// too few tiles for the threads, spans of their contexts are worked on side by side and added up in order. The order in
// which a row's numbers are added up is the same in any case: neither the batch nor the number of threads changes a bit
// of a result.
//
// One .cpp each instantiates it for a type of element: they are compiled side by side.
#pragma once

#include "attention_plan.h"
#include "parallel.h"

namespace cbatch {

// Rows of a tile to attend to what they see of the positions `from` to `to` - 1, which lie in one block.
struct Step {
    long first_row, count, sequence, from, to;
};

// A thread's own memory, which is kept from call to call.
struct Workspace {
    std::vector<float> floats;
    std::vector<long> bounds;
    std::vector<Step> steps;

    float *floats_for(long count) {
        floats.resize(std::max<size_t>(floats.size(), count));
        return floats.data();
    }

    long *bounds_for(long count) {
        bounds.resize(std::max<size_t>(bounds.size(), count));
        return bounds.data();
    }
};

template <class Element>
class TileAttention {
  public:
    TileAttention(const AttentionArguments &arguments, const Tile &tile, Workspace &workspace)
        : a(arguments), tile(tile), group(a.num_heads / a.kv_heads), count(tile.num_tokens * group),
          steps(workspace.steps) {
        layout = {a.head_dim, ceil_div(a.head_dim, WIDTH) * WIDTH, a.key_strides[2], a.value_strides[2],
                  a.softcap * LOG2_E};
        long state_size = State::size(count, layout.row_size);
        float *memory = workspace.floats_for(2 * state_size + count * layout.row_size);
        before = State::in(memory, count, layout.row_size);
        long *bounds = workspace.bounds_for(2 * count);
        rows = {memory + 2 * state_size, bounds, bounds + count,
                State::in(memory + state_size, count, layout.row_size)};
        steps.clear();
    }

    // Attend to all that the rows see, and write the result.
    void attend() {
        begin();
        clear(rows.state, count, layout.row_size);
        if (tile.prompt >= 0)
            plan(0, tile.num_tokens, tile.prompt, 0, context_end(a, tile.prompt));
        else
            for (long i = 0; i < tile.num_tokens;) i = plan_together(i);
        walk(true);
        fold(before, rows.state, count, layout.row_size);
        finish();
    }

    // Attend to what the rows see of one span, and leave it in `memory`.
    void attend_span(long from, long to, float *memory) {
        begin();
        rows.state = State::in(memory, count, layout.row_size);
        clear(rows.state, count, layout.row_size);
        plan(0, tile.num_tokens, tile.sequence(0), from, to);
        walk(false);
    }

    // Add up what was seen in all spans, in their order, and write the result.
    void add_spans(float *memory, long num_spans) {
        begin();
        for (long i = 0; i < num_spans; i++, memory += State::size(count, layout.row_size))
            fold(before, State::in(memory, count, layout.row_size), count, layout.row_size);
        finish();
    }

  private:
    // Set the rows to where nothing was seen but the sinks.
    void begin() {
        float unit = a.scaling * (a.softcap ? 2 * LOG2_E / a.softcap : LOG2_E);
        clear(before, count, layout.row_size);
        for (long row = 0; row < count; row++) {
            long token = tile.token(row / group), head = tile.kv_head * group + row % group;
            long sequence = tile.sequence(row / group), position = position_of(a, sequence, token);
            auto *query = static_cast<const Element *>(a.query);
            query += token * a.query_token_stride + head * a.query_head_stride;
            float *to = rows.query + row * layout.row_size;
            long d = 0;
            for (; d + WIDTH <= a.head_dim; d += WIDTH) store(to + d, load(query + d) * unit);
            if (d < a.head_dim) store(to + d, load<WIDTH / 2>(query + d) * unit);
            if (a.sinks) before.highest[row] = a.sinks[head] * LOG2_E, before.total[row] = 1.0f;
            rows.begin[row] = first_seen(a, sequence, position);
            rows.end[row] = position + 1;
        }
    }

    // Plan for single tokens from the i-th on as long as their sequences begin alike: what is common in common, then for
    // each alone. Returns the first one that was left out.
    long plan_together(long i) {
        long end = i + 1, common_to = context_end(a, tile.sequence(i));
        for (; end < tile.num_tokens; end++) {
            long common = common_end(a, tile.sequence(end - 1), tile.sequence(end));
            if (common == 0 || common < common_to / 2) break;
            common_to = std::min(common_to, common);
        }
        plan(i, end, tile.sequence(i), 0, common_to);
        for (; i < end; i++) plan(i, i + 1, tile.sequence(i), common_to, context_end(a, tile.sequence(i)));
        return end;
    }

    // Plan for the rows of tokens `first` to `last` - 1 to attend to what they see of positions `from` to `to` - 1.
    void plan(long first, long last, long sequence, long from, long to) {
        long first_row = first * group, end_row = last * group;
        from = std::max(from, *std::min_element(rows.begin + first_row, rows.begin + end_row));
        to = std::min(to, *std::max_element(rows.end + first_row, rows.end + end_row));
        for (long block_end; from < to; from = block_end) {
            block_end = std::min(from / BLOCK * BLOCK + BLOCK, to);
            steps.push_back({first_row, end_row - first_row, sequence, from, block_end});
        }
    }

    void walk(bool folds) {
        if (steps.empty()) return;
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
            Rows some = rows.from(step.first_row, layout.row_size);
            attend_block(some, step.count, step.from / BLOCK * BLOCK, now, num_segments, layout, ahead);
            num_segments = num_next;
            if (folds && step.to % SPAN == 0) {
                fold(before.from(step.first_row, layout.row_size), some.state, step.count, layout.row_size);
                clear(some.state, step.count, layout.row_size);
            }
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

    void finish() {
        for (long row = 0; row < count; row++) {
            long token = tile.token(row / group), head = tile.kv_head * group + row % group;
            auto *result = static_cast<Element *>(a.result) + (token * a.num_heads + head) * a.head_dim;
            const float *sums = before.sums + row * layout.row_size;
            Floats total = splat(before.total[row]);
            long d = 0;
            for (; d + WIDTH <= a.head_dim; d += WIDTH) store(result + d, load(sums + d) / total);
            if (d < a.head_dim) store<WIDTH / 2>(result + d, load(sums + d) / total);
        }
    }

    const AttentionArguments &a;
    const Tile &tile;
    long group, count;
    std::vector<Step> &steps;
    Layout layout;
    State before;  // of the spans that are done with
    Rows rows;
};

template <class Element>
void attend_batch(const AttentionArguments &a) {
    std::vector<long> singles = order_singles(a);
    std::vector<Tile> tiles = cut_into_tiles(a, singles);
    std::vector<Part> parts = cut_into_parts(a, tiles);
    long group = a.num_heads / a.kv_heads, row_size = ceil_div(a.head_dim, WIDTH) * WIDTH;
    std::vector<long> places(1, 0);  // of the parts' states
    for (const Part &part : parts) {
        long size = State::size(tiles[part.tile].num_tokens * group, row_size);
        places.push_back(places.back() + (part.whole ? 0 : size));
    }
    std::vector<float> states(places.back());
    static thread_local Workspace workspace;
    parallel_for(parts.size(), 1, a.num_threads, [&](long i) {
        const Part &part = parts[i];
        TileAttention<Element> attention(a, tiles[part.tile], workspace);
        if (part.whole)
            attention.attend();
        else
            attention.attend_span(part.from, part.to, &states[places[i]]);
    });
    for (size_t i = 0, end; i < parts.size(); i = end) {
        for (end = i + 1; end < parts.size() && parts[end].tile == parts[i].tile;) end++;
        if (!parts[i].whole)
            TileAttention<Element>(a, tiles[parts[i].tile], workspace).add_spans(&states[places[i]], end - i);
    }
    auto *result = static_cast<Element *>(a.result);
    long token_size = a.num_heads * a.head_dim, num_padding = a.num_tokens - a.num_query_tokens;
    std::memset(result + a.num_query_tokens * token_size, 0, num_padding * token_size * sizeof(Element));
}

}  // namespace cbatch
