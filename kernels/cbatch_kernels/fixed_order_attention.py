"""Paged attention whose bits do not depend on the batch: what a query token gets is the same in a prefill chunk of any
size, in a decode step among any others, and computed again.

Arguments and result as in `paged_attention`. It holds because

- a product's rows do not depend on how many there are, as long as there are several: they are padded to `row_multiple`
  (below about four a thread, BLAS libraries switch to other kernels);
- scores are sums over head_dim, and masked ones weigh exactly zero, so that padding the context adds nothing;
- the sum over the context is cut into blocks of 256 keys at absolute positions, added up from the first to the last;
- the maximum that a softmax takes off is the whole context's, and no order changes a maximum.

All arithmetic is float32. Called through `dispatch` where determinism is asked for; CPU only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.variant import Variant

KEY_BLOCK = 256
MAX_SCORES = 2**22  # of one piece of work, padding included
MAX_GATHERED_TOKENS = 8_192  # by the decode rows of one piece

RowNumbers = npt.NDArray[np.int64]


def fixed_order_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    row_multiple: int,
) -> Tensor:
    """Attend a ragged batch over its pages; padding after the batch's last query token gives zeros."""
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = key_pages.shape[1]
    grouped = query.reshape(num_tokens, kv_heads, num_heads // kv_heads, head_dim).float()
    variant = Variant.build(kv_heads, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
    out = torch.zeros_like(grouped)
    for sequences, tokens in _pieces(metadata, num_heads, row_multiple, sliding_window):
        # [R, Q, kv_heads, group, D]: R sequences of Q query tokens each
        piece = grouped[tokens]
        out[tokens] = _attend(piece, key_pages, value_pages, metadata, sequences, tokens, variant, row_multiple)
    return out.flatten(1, 2).to(query.dtype)


def _pieces(
    metadata: PagedMetadata, num_heads: int, row_multiple: int, window: int | None
) -> Iterator[tuple[RowNumbers, RowNumbers]]:
    """Cut the batch into pieces of bounded size: sequences [R], and the numbers of their query tokens [R, Q]."""
    contexts = metadata.context_lens_host.astype(np.int64)
    blocks = -(-(contexts if window is None else np.minimum(contexts, window + KEY_BLOCK)) // KEY_BLOCK) + 1
    decodes = np.argsort(blocks[: metadata.num_decode_rows], kind="stable")
    at = 0
    while at < len(decodes):
        most = int(
            min(MAX_GATHERED_TOKENS, MAX_SCORES // (num_heads * row_multiple)) // (2 * blocks[decodes[at]] * KEY_BLOCK)
        )
        rows = decodes[at : at + max(1, most)]
        rows = rows[blocks[rows] <= 2 * blocks[rows[0]]]
        yield rows, rows[:, None]
        at += len(rows)
    first = metadata.num_decode_rows
    for sequence in range(metadata.num_decode_rows, len(contexts)):
        count = int(metadata.query_lens_host[sequence])
        tile = max(row_multiple, int(MAX_SCORES // (num_heads * blocks[sequence] * KEY_BLOCK)))
        for start in range(0, count, tile):
            tokens = np.arange(first + start, first + min(start + tile, count))
            yield np.array([sequence]), tokens[None]
        first += count


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    sequences: RowNumbers,
    tokens: RowNumbers,
    variant: Variant,
    row_multiple: int,
) -> Tensor:
    """Attend query [R, Q, kv_heads, group, D] of the `tokens` [R, Q] of `sequences` [R]; the result likewise."""
    rows, num_queries, kv_heads, group, head_dim = query.shape
    starts = np.zeros(len(sequences), np.int64)
    if metadata.context_starts_host is not None:
        starts = metadata.context_starts_host[sequences].astype(np.int64)
    ends = starts + metadata.context_lens_host[sequences]
    token_ends = np.cumsum(metadata.query_lens_host, dtype=np.int64)[sequences]
    positions = (ends - token_ends)[:, None] + tokens  # absolute, [R, Q]
    window = variant.sliding_window
    first = np.zeros(rows, np.int64) if window is None else np.maximum(positions[:, 0] - window + 1, 0)
    origin = first // KEY_BLOCK * KEY_BLOCK
    num_blocks = int((positions[:, -1] // KEY_BLOCK - origin // KEY_BLOCK).max()) + 1
    keys = origin[:, None] + np.arange(num_blocks * KEY_BLOCK)  # absolute, [R, N]
    visible = keys[:, None] <= positions[:, :, None]
    if window is not None:
        visible &= keys[:, None] > positions[:, :, None] - window
    key, value = _gather(
        key_pages, value_pages, metadata, sequences, keys - starts[:, None], np.asarray(visible.any(1))
    )

    padded = -(-group * num_queries // row_multiple) * row_multiple
    flat = query.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, group * num_queries, head_dim)
    flat = pad(flat, (0, 0, 0, padded - flat.shape[1]))
    scores = variant.cap(torch.bmm(flat, key.transpose(1, 2)) * variant.scaling)
    real = scores[:, : group * num_queries].view(rows, kv_heads, group, num_queries, -1)
    real.masked_fill_(~torch.from_numpy(visible).to(query.device)[:, None, None], float("-inf"))
    attended = _weigh(scores, value, num_blocks, _sink_rows(variant.sinks, rows, num_queries, padded))
    attended = attended[:, : group * num_queries].view(rows, kv_heads, group, num_queries, head_dim)
    return attended.permute(0, 3, 1, 2, 4)


def _weigh(scores: Tensor, value: Tensor, num_blocks: int, sinks: Tensor | None) -> Tensor:
    """Sum value [B, N, D] with the softmax of scores [B, M, N], block after block; changes the scores."""
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    weights = scores.sub_(highest).exp_()
    attended = torch.zeros_like(weights[..., :1] * value[:, :1])
    total = torch.zeros_like(highest)
    for block in range(num_blocks):
        span = slice(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        part = weights[:, :, span].contiguous()
        attended += torch.bmm(part, value[:, span].contiguous())
        total += part.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - highest)
    return attended / total


def _sink_rows(sinks: Tensor | None, rows: int, num_queries: int, padded: int) -> Tensor | None:
    """Lay sinks [kv_heads, group] out along the rows of the scores: [rows * kv_heads, padded, 1]."""
    if sinks is None:
        return None
    kv_heads, group = sinks.shape
    laid = sinks[None, :, :, None].expand(rows, kv_heads, group, num_queries).reshape(rows * kv_heads, -1)
    return pad(laid, (0, padded - laid.shape[1]))[:, :, None]


def _gather(
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    sequences: RowNumbers,
    slots: RowNumbers,
    needed: npt.NDArray[np.bool_],
) -> tuple[Tensor, Tensor]:
    """Copy the context tokens `slots` [R, N] out of the pages, zeros where not needed: [R * kv_heads, N, D] float32."""
    page_size, device = key_pages.shape[2], key_pages.device
    inside = torch.from_numpy(np.where(needed, slots, 0)).to(device)
    tables = metadata.block_tables[torch.from_numpy(sequences).to(device)].long()
    pages, offsets = tables.gather(1, inside // page_size), inside % page_size
    unwritten = torch.from_numpy(~needed).to(device)[:, :, None, None]
    gathered = []
    for store in (key_pages, value_pages):
        copied = store[pages, :, offsets].float().masked_fill_(unwritten, 0.0)  # [R, N, kv_heads, D]
        gathered.append(copied.transpose(1, 2).reshape(-1, copied.shape[1], copied.shape[3]))
    return gathered[0], gathered[1]
