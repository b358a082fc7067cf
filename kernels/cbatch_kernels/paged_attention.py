"""Paged attention: the query tokens of a ragged batch attend to the cached context of their own sequence.

    query                    [T, heads, head_dim], any strides
    key_pages, value_pages   [num_pages, kv_heads, page_size, head_dim], one layer's view, any strides; heads is a
                             multiple of kv_heads and query head h reads KV head h // (heads // kv_heads)
    sinks                    [heads]: one more logit in every softmax, with no value behind it
    result                   [T, heads, head_dim], the query's dtype, contiguous

Causal, aligned to the end of the context: a query token attends to itself and what is before it; with a window of W, to
the last W keys, itself included. With a soft-cap c a score x becomes c * tanh(x / c). float32, bfloat16 or float16,
softmax in float32. Slots that no token was written to may hold anything, NaN included.

Called by every attention layer (cbatch/models/attention.py), through `dispatch`. Leaves out the cache write.

Sources: PagedAttention (arXiv:2309.06180); the window as in transformers/masking_utils.py; the soft-cap as in Gemma 2
(arXiv:2408.00118); sinks as in transformers' gpt_oss.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.variant import Variant

QUERY_TILE = 256  # query tokens of a prompt that share one mask
MAX_GATHERED_TOKENS = 16_384  # context tokens copied out of the pages at a time for single-token rows

RowNumbers = npt.NDArray[np.int64]


def paged_attention_ref(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend a ragged batch over its pages; padding after the batch's last query token gives zeros."""
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = key_pages.shape[1]
    grouped = query.reshape(num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    variant = Variant.build(kv_heads, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks)

    out = query.new_empty(num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    out[metadata.num_query_tokens :] = 0
    for rows in _decode_groups(metadata, key_pages.shape[2], sliding_window):
        _attend_decode_rows(out, grouped, key_pages, value_pages, metadata, rows, variant)
    first_token = metadata.num_decode_rows
    for sequence in range(metadata.num_decode_rows, len(metadata.query_lens_host)):
        span = slice(first_token, first_token + int(metadata.query_lens_host[sequence]))
        _attend_prompt(out[span], grouped[span], key_pages, value_pages, metadata, sequence, variant)
        first_token = span.stop
    return out.flatten(1, 2)


def _decode_groups(metadata: PagedMetadata, page_size: int, window: int | None) -> Iterator[RowNumbers]:
    """Split the single-token rows into groups of like span, so that padding at most doubles what is gathered."""
    num_rows = metadata.num_decode_rows
    if num_rows == 0:
        return
    first, end = _page_spans(metadata.context_lens_host[:num_rows], page_size, window)
    spans = end - first
    order = np.argsort(spans, kind="stable")
    start = 0
    while start < num_rows:
        limit = 2 * spans[order[start]]
        stop = int(np.searchsorted(spans[order], limit, side="right"))
        most = max(1, MAX_GATHERED_TOKENS // int(limit * page_size))
        for at in range(start, stop, most):
            yield np.sort(order[at : min(at + most, stop)])
        start = stop


def _page_spans(
    context_lens: npt.NDArray[np.int32], page_size: int, window: int | None
) -> tuple[RowNumbers, RowNumbers]:
    """Give the first and the end block that the last token of each context attends to."""
    ends = context_lens.astype(np.int64)
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    return starts // page_size, -(-ends // page_size)


def _attend_decode_rows(
    out: Tensor,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    rows: RowNumbers,
    variant: Variant,
) -> None:
    """Attend rows of one query token each, padded to the longest span among them; writes their rows of `out`."""
    page_size = key_pages.shape[2]
    device = query.device
    first, end = _page_spans(metadata.context_lens_host[rows], page_size, variant.sliding_window)
    row_index = torch.from_numpy(rows).to(device)
    blocks = torch.from_numpy(first).to(device)[:, None] + torch.arange(int((end - first).max()), device=device)
    tables = metadata.block_tables[row_index]
    pages = tables.gather(1, blocks.clamp(max=tables.shape[1] - 1))

    context_lens = metadata.context_lens[row_index][:, None]
    positions = (blocks[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)
    valid = positions < context_lens
    if variant.sliding_window is not None:
        valid &= positions >= context_lens - variant.sliding_window
    # Zeroed, not only masked: the weight of an unwritten slot is 0, but 0 times NaN is NaN.
    unwritten = ~valid[:, None, :, None]
    key = _gather(key_pages, pages).masked_fill_(unwritten, 0)
    value = _gather(value_pages, pages).masked_fill_(unwritten, 0)
    # The heads of a group stand in for query tokens, so that no key is repeated for them.
    out[row_index] = _attend(query[row_index].unsqueeze(3), key, value, valid[:, None], variant).squeeze(3)


def _attend_prompt(
    out: Tensor,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    sequence: int,
    variant: Variant,
) -> None:
    """Attend one sequence's query tokens [Q, kv_heads, group, head_dim], tile by tile; writes all of `out`."""
    page_size = key_pages.shape[2]
    num_queries = query.shape[0]
    context_len = int(metadata.context_lens_host[sequence])
    start = context_len - num_queries
    window = variant.sliding_window
    first_block = 0 if window is None else max(start - window + 1, 0) // page_size
    pages = metadata.block_tables[sequence, first_block : -(-context_len // page_size)]
    origin = first_block * page_size
    key = _gather(key_pages, pages[None])[:, :, : context_len - origin]
    value = _gather(value_pages, pages[None])[:, :, : context_len - origin]

    for tile in range(0, num_queries, QUERY_TILE):
        tile_end = min(tile + QUERY_TILE, num_queries)
        key_start = origin if window is None else max(start + tile - window + 1, 0)
        key_end = start + tile_end
        query_positions = torch.arange(start + tile, key_end, device=query.device)[:, None]
        key_positions = torch.arange(key_start, key_end, device=query.device)
        visible = key_positions <= query_positions
        if window is not None:
            visible &= key_positions > query_positions - window
        span = slice(key_start - origin, key_end - origin)
        tile_query = query[tile:tile_end].permute(1, 2, 0, 3)[None]
        attended = _attend(tile_query, key[:, :, span], value[:, :, span], visible[None], variant)
        out[tile:tile_end] = attended[0].permute(2, 0, 1, 3)


def _gather(pages: Tensor, page_numbers: Tensor) -> Tensor:
    """Copy pages [R, n] of every KV head out of the pool: [R, kv_heads, n * page_size, head_dim]."""
    heads = torch.arange(pages.shape[1], device=pages.device)[:, None]
    return pages[page_numbers[:, None], heads].flatten(2, 3)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, variant: Variant) -> Tensor:
    """Attend query [R, kv_heads, group, Q, D] to key, value [R, kv_heads, N, D] under a mask [R, Q, N]."""
    if variant.softcap is None and variant.sinks is None:
        rows, kv_heads, group, num_queries, head_dim = query.shape
        if num_queries == 1:
            folded, mask = query.squeeze(3), visible[:, None]
            attended = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=variant.scaling)
            return attended.unsqueeze(3)
        shared = (rows * kv_heads, group, -1, head_dim)
        attended = scaled_dot_product_attention(
            query.reshape(rows * kv_heads, group, num_queries, head_dim),
            key.flatten(0, 1)[:, None].expand(shared),
            value.flatten(0, 1)[:, None].expand(shared),
            attn_mask=visible.repeat_interleave(kv_heads, 0)[:, None],
            scale=variant.scaling,
        )
        return attended.reshape(rows, kv_heads, group, num_queries, head_dim)
    return _attend_plainly(query, key, value, visible, variant)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, variant: Variant) -> Tensor:
    """As `_attend`, in float32 and with the soft-cap and the sinks that PyTorch's own attention lacks."""
    keys, values = key.float()[:, :, None], value.float()[:, :, None]
    scores = variant.cap(torch.matmul(query.float(), keys.transpose(-1, -2)) * variant.scaling)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if variant.sinks is not None:
        sink = variant.sinks[None, :, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return torch.matmul(weights, values).to(query.dtype)
