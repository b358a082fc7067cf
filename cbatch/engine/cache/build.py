"""Lays out the cache for a model: which layers form an attention type, and how their blocks tile the chunks.

Called by the engine once the plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from cbatch.engine.cache.allocator import CacheAllocator
from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbatch.engine.cache.sliding import SlidingAttentionCacheAllocator
from cbatch.units import ceil_div


def build_cache(
    windows: Sequence[int | None],
    *,
    num_blocks: int,
    page_size: int,
    max_batch_tokens: int,
    max_model_len: int,
    allow_block_sharing: bool,
) -> CacheManager:
    """Build pool, allocators and manager for layers with these `windows` (None: full attention).

    The pool holds at least `num_blocks` whole-model blocks, each a page of every layer.
    """
    groups = group_layers(windows, max_model_len)
    pages_per_chunk = lcm(*(len(layers) for layers in groups.values()))
    num_chunks = ceil_div(num_blocks * len(windows), pages_per_chunk) + NUM_RESERVED_CHUNKS
    pool = CachePool(num_chunks, pages_per_chunk)
    allocators: list[CacheAllocator] = [
        FullAttentionCacheAllocator(pool, layers, page_size)
        if window is None
        else SlidingAttentionCacheAllocator(
            pool, layers, page_size, window=window, max_batch_tokens=min(max_batch_tokens, max_model_len)
        )
        for window, layers in groups.items()
    ]
    return CacheManager(pool, allocators, allow_block_sharing=allow_block_sharing)


def group_layers(windows: Sequence[int | None], max_model_len: int) -> dict[int | None, tuple[int, ...]]:
    """Group the layers by window, full attention first; a window that nothing outgrows is none."""
    binding = [None if window is None or window >= max_model_len else window for window in windows]
    kinds = sorted(set(binding), key=lambda window: window or 0)
    return {kind: tuple(i for i, window in enumerate(binding) if window == kind) for kind in kinds}
