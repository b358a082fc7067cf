"""Attention token by token, in float64 and without pages' tricks: what every implementation is held to.

Also builds the cases: pools full of NaN in which only the tokens of the batch were written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from cbatch_kernels.dispatch import paged_attention
from cbatch_kernels.metadata import PagedMetadata
from torch import Tensor

# Largest |result - oracle| allowed for values of about one: rounding of the result, and of weights where it is low.
TOLERANCE = {torch.float32: 1.5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Variant:
    """One way of attending, and the sizes it is tried at."""

    dtype: torch.dtype = torch.float32
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    scaling: float = 0.3


@dataclass(frozen=True)
class Case:
    """A batch with everything that an implementation is given."""

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    metadata: PagedMetadata
    sinks: Tensor | None


def run(case: Case, variant: Variant, row_multiple: int | None = None) -> Tensor:
    """Attend as an attention layer does."""
    return paged_attention(
        case.query,
        case.key_pages,
        case.value_pages,
        case.metadata,
        scaling=variant.scaling,
        sliding_window=variant.sliding_window,
        softcap=variant.softcap,
        sinks=case.sinks,
        row_multiple=row_multiple,
    )


def build_case(
    variant: Variant,
    lens: list[tuple[int, int]],
    *,
    padding: int = 0,
    seed: int = 0,
    shared_pages: int = 0,
    num_prefixes: int = 1,
) -> Case:
    """Build a batch of (query length, context length) rows; keys that no query may see stay NaN.

    Rows begin with the same `shared_pages` as one of the first `num_prefixes` in turn; no window may leave these out.
    """
    generator = torch.Generator().manual_seed(seed)
    page_size, window = variant.page_size, variant.sliding_window
    width = max(-(-context // page_size) for _, context in lens) + 1
    num_pages = 2 + len(lens) * width
    tables = (torch.randperm(num_pages - 1, generator=generator)[: len(lens) * width] + 1).view(len(lens), width)
    tables[:, :shared_pages] = tables[torch.arange(len(lens)) % num_prefixes, :shared_pages]
    pools = torch.full((2, num_pages, variant.kv_heads, page_size, variant.head_dim), math.nan, dtype=variant.dtype)
    for row, (num_queries, context) in enumerate(lens):
        first = 0 if window is None else max(0, context - num_queries - window + 1)
        for position in range(max(first, shared_pages * page_size if row >= num_prefixes else 0), context):
            drawn = torch.randn(2, variant.kv_heads, variant.head_dim, generator=generator)
            pools[:, tables[row, position // page_size], :, position % page_size] = drawn.to(variant.dtype)
        tables[row, -(-context // page_size) :] = 0  # a page of NaN, as padding
        tables[row, : first // page_size] = 0
    num_tokens = sum(num_queries for num_queries, _ in lens) + padding
    # Strided as a model hands it over: [1, heads, T, head_dim] seen as [T, heads, head_dim].
    query = torch.randn(variant.num_heads, num_tokens, variant.head_dim, generator=generator).to(variant.dtype)
    return Case(
        query=query.transpose(0, 1),
        key_pages=pools[0],
        value_pages=pools[1],
        metadata=PagedMetadata.build(
            np.array([num_queries for num_queries, _ in lens], dtype=np.int32),
            np.array([context for _, context in lens], dtype=np.int32),
            tables.to(torch.int32),
        ),
        sinks=torch.randn(variant.num_heads, generator=generator) * 2 if variant.has_sinks else None,
    )


def attend(case: Case, variant: Variant) -> Tensor:
    """Attend one query token and one head at a time; float64 [T, heads, head_dim] of the batch's own tokens."""
    group = variant.num_heads // variant.kv_heads
    results = []
    token = 0
    for row, num_queries in enumerate(case.metadata.query_lens_host.tolist()):
        context = int(case.metadata.context_lens_host[row])
        for position in range(context - num_queries, context):
            start = 0 if variant.sliding_window is None else max(0, position - variant.sliding_window + 1)
            heads = []
            for head in range(variant.num_heads):
                slots = range(start, position + 1)
                keys, values = (_slots(p, case, row, slots, head // group) for p in (case.key_pages, case.value_pages))
                heads.append(_attend_one(case.query[token, head].double(), keys, values, case, variant, head))
            results.append(torch.stack(heads))
            token += 1
    return torch.stack(results)


def _slots(pages: Tensor, case: Case, row: int, positions: range, kv_head: int) -> Tensor:
    page_size, at = pages.shape[2], torch.tensor(positions)
    return pages[case.metadata.block_tables[row].long()[at // page_size], kv_head, at % page_size].double()


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, case: Case, variant: Variant, head: int) -> Tensor:
    scores = (keys @ query) * variant.scaling
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    weights = torch.exp(scores - scores.max())
    total = weights.sum()
    if case.sinks is not None:
        total = total + torch.exp(case.sinks[head].double() - scores.max())
    return (weights[:, None] * values).sum(0) / total
