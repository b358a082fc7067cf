"""The kernels behind `triton_attention`, which launches them and says what their arguments are.

A program of `attend` works on a tile: some query tokens of one sequence with all query heads of one KV head, and on a
span of that sequence's keys. One of `attend_prefixes` works on single tokens of sequences that begin with the same
pages, and on a span of these. `join_spans` adds spans up.
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    query_ptr,
    key_ptr,
    value_ptr,
    result_ptr,  # [T, heads, head_dim]; of spans float32 [T, heads, spans, head_dim]
    peak_ptr,  # float32 [T, heads, spans]: the largest score of a span
    total_ptr,  # as peak_ptr: the sum of its weights
    cu_seqlens_ptr,
    context_lens_ptr,
    starts_ptr,  # int32 [sequences]: keys that were attended to before, by `attend_prefixes`
    tables_ptr,
    sinks_ptr,
    first_sequence,
    end_sequence,
    query_strides,  # of token, head, dimension
    key_strides,  # of page, head, slot, dimension
    value_strides,
    table_stride,
    scaling,
    softcap,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    NUM_SPANS: tl.constexpr,  # that are made here
    FIRST_SPAN: tl.constexpr,  # where these lie among
    ALL_SPANS: tl.constexpr,  # those that are joined; 1: what is made here is all
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, part = tl.program_id(1), tl.program_id(2)
    sequence, first_query, num_queries, tile = find_tile(cu_seqlens_ptr, first_sequence, end_sequence, QUERY_TILE)
    if tile >= num_queries:
        return
    tokens, heads, is_row = find_rows(tile, num_queries, kv_head, QUERY_TILE, GROUP, GROUP_PAD)
    tokens_at = (first_query + tokens).to(tl.int64)
    query = load_queries(query_ptr, tokens_at, heads, is_row, query_strides, HEAD_DIM, HEAD_PAD)

    context_len = tl.load(context_lens_ptr + sequence)
    first_position = context_len - num_queries
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position + tile - WINDOW + 1, 0)
    if HAS_STARTS:
        first_key = tl.load(starts_ptr + sequence)
    end_key = tl.minimum(first_position + tile + QUERY_TILE, context_len)
    begin, end = find_span(first_key // KEY_BLOCK * KEY_BLOCK, end_key, part, NUM_SPANS, KEY_BLOCK)
    peak, total, result = walk_keys(
        query,
        key_ptr + kv_head * key_strides[1],
        value_ptr + kv_head * value_strides[1],
        tables_ptr + sequence * table_stride,
        first_position + tokens,
        (begin, end, first_key, end_key),
        key_strides,
        value_strides,
        scaling,
        softcap,
        HEAD_DIM,
        PAGE_SIZE,
        KEY_BLOCK,
        WINDOW,
        HAS_SOFTCAP,
        DOT,
        PRECISION,
    )
    results_at = tokens_at * tl.num_programs(1) * GROUP + heads
    if ALL_SPANS > 1:
        results_at = results_at * ALL_SPANS + FIRST_SPAN + part
        tl.store(peak_ptr + results_at, peak, mask=is_row)
        tl.store(total_ptr + results_at, total, mask=is_row)
    else:
        if HAS_SINKS:
            total, result = add_sinks(peak, total, result, tl.load(sinks_ptr + heads, mask=is_row, other=0.0))
        result = result / tl.where(is_row, total, 1.0)[:, None]
    store_results(result_ptr, results_at, result, is_row, HEAD_DIM, HEAD_PAD)


@triton.jit
def attend_prefixes(
    query_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,  # float32 [R, heads, ALL_SPANS, head_dim], as the next two: the first spans are made here
    peak_ptr,
    total_ptr,
    cu_members_ptr,  # int32 [groups + 1]
    members_ptr,  # int32 [R]: rows, group by group
    prefix_lens_ptr,  # int32 [groups]
    tables_ptr,
    num_groups,
    query_strides,  # of token, head, dimension
    key_strides,  # of page, head, slot, dimension
    value_strides,
    table_stride,
    scaling,
    softcap,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_SPANS: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, part = tl.program_id(1), tl.program_id(2)
    group, first_member, num_members, tile = find_tile(cu_members_ptr, 0, num_groups, ROW_TILE)
    if tile >= num_members:
        return
    members, heads, is_row = find_rows(tile, num_members, kv_head, ROW_TILE, GROUP, GROUP_PAD)
    tokens_at = tl.load(members_ptr + first_member + members, mask=is_row, other=0).to(tl.int64)
    query = load_queries(query_ptr, tokens_at, heads, is_row, query_strides, HEAD_DIM, HEAD_PAD)

    prefix_len = tl.load(prefix_lens_ptr + group)
    table = tl.load(members_ptr + first_member).to(tl.int64) * table_stride  # any member's will do
    begin, end = find_span(0, prefix_len, part, NUM_SPANS, KEY_BLOCK)
    peak, total, result = walk_keys(
        query,
        key_ptr + kv_head * key_strides[1],
        value_ptr + kv_head * value_strides[1],
        tables_ptr + table,
        tl.zeros_like(members) + prefix_len,
        (begin, end, 0, prefix_len),
        key_strides,
        value_strides,
        scaling,
        softcap,
        HEAD_DIM,
        PAGE_SIZE,
        KEY_BLOCK,
        0,
        HAS_SOFTCAP,
        DOT,
        PRECISION,
    )
    results_at = (tokens_at * tl.num_programs(1) * GROUP + heads) * ALL_SPANS + part
    tl.store(peak_ptr + results_at, peak, mask=is_row)
    tl.store(total_ptr + results_at, total, mask=is_row)
    store_results(partial_ptr, results_at, result, is_row, HEAD_DIM, HEAD_PAD)


@triton.jit
def walk_keys(
    query,
    key_ptr,  # the KV head's
    value_ptr,
    table_ptr,  # the sequence's
    positions,
    span,  # begin, end; and, beyond these, the first key that is seen and the end of those
    key_strides,
    value_strides,
    scaling,
    softcap,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to a span of keys: the largest score of each row, the sum of its weights, their values."""
    begin, end, first_key, end_key = span
    dims = tl.arange(0, query.shape[1])
    is_dim = dims < HEAD_DIM
    peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    result = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    for at in range(begin, end, KEY_BLOCK):
        keys = at + tl.arange(0, KEY_BLOCK)
        is_key = (keys >= first_key) & (keys < end_key)
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        key_at = pages * key_strides[0] + keys % PAGE_SIZE * key_strides[2]
        value_at = pages * value_strides[0] + keys % PAGE_SIZE * value_strides[2]
        # What no token was written to may hold anything: it is not read.
        key = tl.load(
            key_ptr + key_at[None, :] + dims[:, None] * key_strides[3],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        value = tl.load(
            value_ptr + value_at[:, None] + dims[None, :] * value_strides[3],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        scores = tl.dot(query.to(DOT), key.to(DOT), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            scores = cap(scores, softcap)
        sees = is_key[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            sees = sees & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        # A row that sees nothing yet keeps a peak of -inf, and takes 0 in its place so that no NaN arises.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, fading = tl.exp(scores - shift[:, None]), tl.exp(peak - shift)
        total = total * fading + tl.sum(weights, 1)
        result = tl.dot(weights.to(DOT), value.to(DOT), result * fading[:, None], input_precision=PRECISION)
        peak = new_peak
    return peak, total, result


@triton.jit
def find_tile(cu_seqlens_ptr, first_sequence, end_sequence, QUERY_TILE: tl.constexpr):
    """Find this program's sequence, its first query token and their number, and the tile's first token among them.

    A sequence is given one tile more than its tokens could need, so that where its tiles begin follows from sums that
    are there already; a tile beyond its tokens has nothing to do.
    """
    wanted = tl.program_id(0)
    base = tl.load(cu_seqlens_ptr + first_sequence)
    low, high = first_sequence, end_sequence
    while low + 1 < high:
        middle = (low + high) // 2
        if (tl.load(cu_seqlens_ptr + middle) - base) // QUERY_TILE + middle - first_sequence <= wanted:
            low = middle
        else:
            high = middle
    first_query = tl.load(cu_seqlens_ptr + low)
    num_queries = tl.load(cu_seqlens_ptr + low + 1) - first_query
    skipped = (first_query - base) // QUERY_TILE + low - first_sequence
    return low, first_query, num_queries, (wanted - skipped) * QUERY_TILE


@triton.jit
def find_rows(tile, num_tokens, kv_head, TILE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Lay a tile out in rows, its tokens times the query heads of a KV head: token, head, and whether it is one."""
    rows = tl.arange(0, TILE * GROUP_PAD)
    tokens, group_heads = tile + rows // GROUP_PAD, rows % GROUP_PAD
    return tokens, kv_head * GROUP + group_heads, (tokens < num_tokens) & (group_heads < GROUP)


@triton.jit
def load_queries(query_ptr, tokens_at, heads, is_row, strides, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    dims = tl.arange(0, HEAD_PAD)
    query_at = tokens_at * strides[0] + heads * strides[1]
    return tl.load(
        query_ptr + query_at[:, None] + dims[None, :] * strides[2],
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def store_results(result_ptr, results_at, results, is_row, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    dims = tl.arange(0, HEAD_PAD)
    tl.store(
        result_ptr + (results_at * HEAD_DIM)[:, None] + dims[None, :],
        results.to(result_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit
def find_span(first_key, end_key, part, NUM_SPANS: tl.constexpr, KEY_BLOCK: tl.constexpr):
    """Find the keys of a part where programs share them, whole blocks each: by what is there, not by the launch."""
    begin, end = first_key, end_key
    if NUM_SPANS > 1:
        span = tl.cdiv(tl.cdiv(end_key - first_key, NUM_SPANS), KEY_BLOCK) * KEY_BLOCK
        begin = first_key + part * span
        end = tl.minimum(end_key, begin + span)
    return begin, end


@triton.jit
def cap(scores, softcap):
    """softcap * tanh(scores / softcap), which overflows nowhere."""
    fall = tl.exp(-2.0 * tl.abs(scores) / softcap)
    return tl.where(scores < 0, -softcap, softcap) * (1.0 - fall) / (1.0 + fall)


@triton.jit
def add_sinks(peak, total, result, sinks):
    """Count a logit without a value among a row's."""
    sinks = sinks.to(tl.float32)
    highest = tl.maximum(peak, sinks)
    fading = tl.exp(peak - highest)
    return total * fading + tl.exp(sinks - highest), result * fading[:, None]


@triton.jit
def join_spans(
    result_ptr,  # [T, heads, head_dim]
    partial_ptr,  # float32 [T, heads, spans, head_dim]
    peak_ptr,  # float32 [T, heads, spans]
    total_ptr,
    sinks_ptr,
    starts_ptr,  # int32 [T]: where it is 0, nothing was written to the prefix's spans
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PREFIX_SPANS: tl.constexpr,  # the first of all
    NUM_SPANS: tl.constexpr,
    SPANS_PAD: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    parts, dims = tl.arange(0, SPANS_PAD), tl.arange(0, HEAD_PAD)
    is_part, is_dim = parts < NUM_SPANS, dims < HEAD_DIM
    if PREFIX_SPANS > 0:
        is_part = is_part & ((parts >= PREFIX_SPANS) | (tl.load(starts_ptr + tl.program_id(0)) > 0))
    peaks = tl.load(peak_ptr + row * NUM_SPANS + parts, mask=is_part, other=float("-inf"))
    totals = tl.load(total_ptr + row * NUM_SPANS + parts, mask=is_part, other=0.0)
    partial = tl.load(
        partial_ptr + (row * NUM_SPANS + parts[:, None]) * HEAD_DIM + dims[None, :],
        mask=is_part[:, None] & is_dim[None, :],
        other=0.0,
    )
    highest = tl.max(peaks, 0)
    if HAS_SINKS:
        highest = tl.maximum(highest, tl.load(sinks_ptr + head).to(tl.float32))
    weights = tl.exp(peaks - highest)  # 0 for a span in which nothing is seen
    total = tl.sum(totals * weights, 0)
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - highest)
    joined = tl.sum(partial * weights[:, None], 0) / total
    tl.store(result_ptr + row * HEAD_DIM + dims, joined.to(result_ptr.dtype.element_ty), mask=is_dim)
