"""Paged attention in Triton: `paged_attention_ref` for CUDA devices, and for CPUs under Triton's interpreter.

One kernel attends for prompts and single tokens alike. Its unit is a tile: some query tokens of one sequence with all
query heads of one KV head, whose keys are walked block by block where they lie in their pages. Few long contexts are
cut into spans that are attended to side by side and joined by a second kernel. Shapes as in `paged_attention`.

Called by `dispatch`. Leaves out which implementation runs.

Sources: FlashAttention-2 (arXiv:2307.08691); split keys as in Flash-Decoding; a ragged grid as in vLLM's unified
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.triton_kernels.attention import attend, join_spans
from cbatch_kernels.triton_launch import count_processors, dot_dtype, launch

MIN_DOT = 16  # the least that tensor cores multiply
SINGLE_WARPS = 8
LEAST_SPAN = 256  # keys that are worth a program of their own
MAX_SPANS = 16
PROGRAMS_PER_PROCESSOR = 2  # that hide one another's waits for memory


@dataclass(frozen=True, slots=True)
class Tiles:
    """How much of a batch is worked on at a time: as much as fits the registers for heads of a size."""

    prompt_rows: int  # query tokens of a prompt times query heads of a KV head
    prompt_keys: int
    prompt_warps: int
    single_keys: int  # for sequences of one query token


# By the largest head that they are for. In float32 no tensor core multiplies, and operands fill the registers.
TILES = {64: Tiles(64, 64, 8, 64), 128: Tiles(128, 32, 8, 64), 256: Tiles(32, 16, 4, 32)}
FLOAT32_TILES = {256: Tiles(32, 16, 8, 16)}


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the launches for one layer have in common."""

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    metadata: PagedMetadata
    scaling: float
    window: int
    softcap: float | None
    sinks: Tensor | None

    @property
    def tiles(self) -> Tiles:
        choices = FLOAT32_TILES if self.query.dtype == torch.float32 else TILES
        return next(tiles for size, tiles in choices.items() if self.query.shape[2] <= size)

    @property
    def kv_heads(self) -> int:
        return self.key_pages.shape[1]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv_heads


def paged_attention_triton(
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
    """Attend a ragged batch over its pages; as the reference."""
    assert key_pages.dtype == value_pages.dtype == query.dtype
    layer = _Layer(query, key_pages, value_pages, metadata, scaling, sliding_window or 0, softcap, sinks)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    result[metadata.num_query_tokens :].zero_()
    num_single, num_sequences = metadata.num_decode_rows, len(metadata.query_lens_host)
    if num_single > 0:
        _attend_single_tokens(layer, result)
    if num_sequences > num_single:
        tile = max(1, layer.tiles.prompt_rows // _pad(layer.group))
        num_tokens = metadata.num_query_tokens - num_single
        num_tiles = num_tokens // tile + num_sequences - num_single
        shape = (tile, layer.tiles.prompt_keys, layer.tiles.prompt_warps)
        _launch_attend(layer, result, (num_single, num_sequences), num_tiles, shape)
    return result


def _attend_single_tokens(layer: _Layer, result: Tensor) -> None:
    """Attend the sequences with one query token: the leading ones."""
    metadata = layer.metadata
    num_rows = metadata.num_decode_rows
    span, num_spans = _choose_spans(layer)
    tile = max(1, MIN_DOT // _pad(layer.group))
    num_tiles = num_rows // tile + num_rows
    shape = (tile, layer.tiles.single_keys, SINGLE_WARPS)
    if num_spans == 1:
        _launch_attend(layer, result, (0, num_rows), num_tiles, shape)
        return
    heads, head_dim = layer.query.shape[1:]
    partial = result.new_empty((num_rows, heads, num_spans, head_dim), dtype=torch.float32)
    peaks, totals = partial.new_empty((2, num_rows, heads, num_spans))
    spans = (span, num_spans, peaks, totals)
    _launch_attend(layer, partial, (0, num_rows), num_tiles, shape, spans)
    launch(
        join_spans,
        (num_rows, heads),
        result,
        partial,
        peaks,
        totals,
        layer.sinks,
        HEAD_DIM=head_dim,
        HEAD_PAD=_pad(head_dim),
        HAS_SINKS=layer.sinks is not None,
        NUM_SPANS=num_spans,
        SPANS_PAD=_pad(num_spans),
    )


def _choose_spans(layer: _Layer) -> tuple[int, int]:
    """Choose how many keys a program walks over, and how many programs share a context.

    As many as keep the device busy, by the longest context; a window leaves few keys, which are not shared.
    """
    metadata = layer.metadata
    longest = int(metadata.context_lens_host[: metadata.num_decode_rows].max())
    programs = PROGRAMS_PER_PROCESSOR * count_processors(layer.query.device)
    wanted = -(-programs // (metadata.num_decode_rows * layer.kv_heads))
    num_spans = 1 if layer.window else max(1, min(wanted, MAX_SPANS, longest // LEAST_SPAN))
    block = layer.tiles.single_keys
    span = -(-longest // (num_spans * block)) * block
    return span, -(-longest // span)


def _launch_attend(
    layer: _Layer,
    result: Tensor,
    sequences: tuple[int, int],
    num_tiles: int,
    shape: tuple[int, int, int],
    spans: tuple[int, int, Tensor, Tensor] | None = None,
) -> None:
    """Attend for the sequences from the first to before the second; without `spans` a context is walked at once.

    `shape` of a program: query tokens, keys at a time, warps.
    """
    query_tile, key_block, num_warps = shape
    query, key_pages, value_pages, metadata = layer.query, layer.key_pages, layer.value_pages, layer.metadata
    span, num_spans, peaks, totals = spans if spans is not None else (0, 1, None, None)
    head_dim = query.shape[2]
    launch(
        attend,
        (num_tiles, layer.kv_heads, num_spans),
        query,
        key_pages,
        value_pages,
        result,
        peaks,
        totals,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        metadata.block_tables,
        layer.sinks,
        *sequences,
        *query.stride(),
        *key_pages.stride(),
        *value_pages.stride(),
        metadata.block_tables.stride(0),
        layer.scaling,
        layer.softcap or 0.0,
        span,
        GROUP=layer.group,
        GROUP_PAD=_pad(layer.group),
        HEAD_DIM=head_dim,
        HEAD_PAD=max(MIN_DOT, _pad(head_dim)),
        PAGE_SIZE=key_pages.shape[2],
        QUERY_TILE=query_tile,
        KEY_BLOCK=key_block,
        WINDOW=layer.window,
        HAS_SOFTCAP=layer.softcap is not None,
        HAS_SINKS=layer.sinks is not None,
        NUM_SPANS=num_spans,
        DOT=dot_dtype(query.dtype),
        PRECISION="ieee",
        num_warps=num_warps,
    )


def _pad(count: int) -> int:
    return int(triton.next_power_of_2(count))
