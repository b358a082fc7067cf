"""Paged attention in Triton: `paged_attention_ref` for CUDA devices, and for CPUs under Triton's interpreter.

One kernel attends for prompts and single tokens alike. Its unit is a tile: some query tokens of one sequence with all
query heads of one KV head, whose keys are walked block by block where they lie in their pages. Few long contexts are
cut into spans that are attended to side by side and joined by a second kernel. Where single tokens' sequences begin
with the same pages (`shared_prefix`) a kernel of its own attends to these first, for many rows at a time: its results
are spans like others, and every row's own keys make the rest. Shapes as in `paged_attention`.

Called by `dispatch`. Leaves out which implementation runs.

Sources: FlashAttention-2 (arXiv:2307.08691); split keys as in Flash-Decoding; a ragged grid as in vLLM's unified
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.shared_prefix import SharedPrefixes
from cbatch_kernels.triton_kernels.attention import attend, attend_prefixes, join_spans
from cbatch_kernels.triton_launch import count_processors, dot_dtype, launch
from cbatch_kernels.triton_tiles import MIN_DOT, Tiles, tiles_for

LEAST_SPAN = 256  # keys that are worth a program of their own
MAX_SPANS = 16
PROGRAMS_PER_PROCESSOR = 2  # that hide one another's waits for memory


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
    tiles: Tiles

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
    tiles: Tiles | None = None,
) -> Tensor:
    """Attend a ragged batch over its pages; as the reference. In `tiles` where given, else those of the device."""
    assert key_pages.dtype == value_pages.dtype == query.dtype
    heads = (query.shape[1], key_pages.shape[1], query.shape[2])
    tiles = tiles or tiles_for(query.device, query.dtype, *heads)
    layer = _Layer(query, key_pages, value_pages, metadata, scaling, sliding_window or 0, softcap, sinks, tiles)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    result[metadata.num_query_tokens :].zero_()
    num_single, num_sequences = metadata.num_decode_rows, len(metadata.query_lens_host)
    if num_single > 0:
        _attend_single_tokens(layer, result)
    if num_sequences > num_single:
        tile = max(1, layer.tiles.prompt_rows // _pad(layer.group))
        num_tokens = metadata.num_query_tokens - num_single
        num_tiles = num_tokens // tile + num_sequences - num_single
        shape = (tile, layer.tiles.prompt_keys, layer.tiles.prompt_warps, layer.tiles.prompt_stages)
        _launch_attend(layer, result, (num_single, num_sequences), num_tiles, shape)
    return result


@dataclass(frozen=True, slots=True)
class _Spans:
    """What is attended to side by side for the sequences with one query token, and joined."""

    num_prefix: int  # the first of all
    num_own: int
    partial: Tensor  # float32 [R, heads, spans, head_dim]
    peaks: Tensor  # float32 [R, heads, spans]
    totals: Tensor

    @property
    def count(self) -> int:
        return self.num_prefix + self.num_own


def _attend_single_tokens(layer: _Layer, result: Tensor) -> None:
    """Attend the sequences with one query token: the leading ones."""
    num_rows = layer.metadata.num_decode_rows
    prefixes = layer.metadata.prefixes if not layer.window else None
    tile = max(1, MIN_DOT // _pad(layer.group))
    num_tiles = num_rows // tile + num_rows
    shape = (tile, layer.tiles.single_keys, layer.tiles.single_warps, layer.tiles.single_stages)
    num_own = 1 if layer.window else _choose_spans(layer, num_rows)
    if num_own == 1 and prefixes is None:
        _launch_attend(layer, result, (0, num_rows), num_tiles, shape)
        return
    row_tile = max(1, layer.tiles.prompt_rows // _pad(layer.group))
    num_prefix = 0 if prefixes is None else _choose_spans(layer, -(-num_rows // row_tile))
    heads, head_dim = layer.query.shape[1:]
    partial = result.new_empty((num_rows, heads, num_prefix + num_own, head_dim), dtype=torch.float32)
    spans = _Spans(num_prefix, num_own, partial, *partial.new_empty((2, *partial.shape[:-1])))
    if prefixes is not None:
        _launch_attend_prefixes(layer, prefixes, row_tile, spans)
    _launch_attend(layer, partial, (0, num_rows), num_tiles, shape, spans)
    launch(
        join_spans,
        (num_rows, heads),
        result,
        partial,
        spans.peaks,
        spans.totals,
        layer.sinks,
        None if prefixes is None else prefixes.row_lens,
        HEAD_DIM=head_dim,
        HEAD_PAD=_pad(head_dim),
        HAS_SINKS=layer.sinks is not None,
        PREFIX_SPANS=num_prefix,
        NUM_SPANS=spans.count,
        SPANS_PAD=_pad(spans.count),
    )


def _choose_spans(layer: _Layer, num_tiles: int) -> int:
    """Choose how many programs share a context: as many as keep the device busy, by the longest one.

    How many keys each of them walks over follows from the context, on the device: a captured launch serves any.
    """
    longest = int(layer.metadata.context_lens_host[: layer.metadata.num_decode_rows].max())
    programs = PROGRAMS_PER_PROCESSOR * count_processors(layer.query.device)
    wanted = -(-programs // (num_tiles * layer.kv_heads))
    return max(1, min(wanted, MAX_SPANS, longest // LEAST_SPAN))


def _launch_attend_prefixes(layer: _Layer, prefixes: SharedPrefixes, row_tile: int, spans: _Spans) -> None:
    """Attend to the prefixes that rows share, into the first of `spans`."""
    launch(
        attend_prefixes,
        (prefixes.num_rows // row_tile + prefixes.max_groups, layer.kv_heads, spans.num_prefix),
        layer.query,
        layer.key_pages,
        layer.value_pages,
        spans.partial,
        spans.peaks,
        spans.totals,
        prefixes.cu_members,
        prefixes.members,
        prefixes.group_lens,
        layer.metadata.block_tables,
        prefixes.max_groups,
        layer.query.stride(),
        layer.key_pages.stride(),
        layer.value_pages.stride(),
        layer.metadata.block_tables.stride(0),
        layer.scaling,
        layer.softcap or 0.0,
        **_constants(layer),
        ROW_TILE=row_tile,
        KEY_BLOCK=layer.tiles.prompt_keys,
        NUM_SPANS=spans.num_prefix,
        ALL_SPANS=spans.count,
        num_warps=layer.tiles.prompt_warps,
        num_stages=layer.tiles.prompt_stages,
    )


def _launch_attend(
    layer: _Layer,
    result: Tensor,
    sequences: tuple[int, int],
    num_tiles: int,
    shape: tuple[int, int, int, int],
    spans: _Spans | None = None,
) -> None:
    """Attend for the sequences from the first to before the second; without `spans` a context is walked at once.

    `shape` of a program: query tokens, keys at a time, warps, and blocks of keys that are on their way at once.
    """
    query_tile, key_block, num_warps, num_stages = shape
    query, key_pages, value_pages, metadata = layer.query, layer.key_pages, layer.value_pages, layer.metadata
    starts = metadata.prefixes.row_lens if spans is not None and metadata.prefixes is not None else None
    num_spans = spans.num_own if spans is not None else 1
    launch(
        attend,
        (num_tiles, layer.kv_heads, num_spans),
        query,
        key_pages,
        value_pages,
        result,
        spans.peaks if spans is not None else None,
        spans.totals if spans is not None else None,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        starts,
        metadata.block_tables,
        layer.sinks,
        *sequences,
        query.stride(),
        key_pages.stride(),
        value_pages.stride(),
        metadata.block_tables.stride(0),
        layer.scaling,
        layer.softcap or 0.0,
        **_constants(layer),
        QUERY_TILE=query_tile,
        KEY_BLOCK=key_block,
        WINDOW=layer.window,
        HAS_SINKS=layer.sinks is not None,
        HAS_STARTS=starts is not None,
        NUM_SPANS=num_spans,
        FIRST_SPAN=spans.num_prefix if spans is not None else 0,
        ALL_SPANS=spans.count if spans is not None else 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _constants(layer: _Layer) -> dict[str, Any]:
    """Give what every kernel that attends is compiled for."""
    head_dim = layer.query.shape[2]
    return {
        "GROUP": layer.group,
        "GROUP_PAD": _pad(layer.group),
        "HEAD_DIM": head_dim,
        "HEAD_PAD": max(MIN_DOT, _pad(head_dim)),
        "PAGE_SIZE": layer.key_pages.shape[2],
        "HAS_SOFTCAP": layer.softcap is not None,
        "DOT": dot_dtype(layer.query.dtype),
        "PRECISION": "ieee",
    }


def _pad(count: int) -> int:
    return int(triton.next_power_of_2(count))
