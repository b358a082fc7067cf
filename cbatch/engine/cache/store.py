"""The unowned blocks of one attention type: takes chunks from the pool, splits them, gives whole ones back.

Shared by the allocators of all attention types; only they call it.
"""

from __future__ import annotations

from cbatch.engine.cache.pool import CachePool
from cbatch.units import ceil_div


class BlockStore:
    """Uninitialized blocks of `num_layers` pages each, cut from the pool's chunks."""

    def __init__(self, pool: CachePool, num_layers: int) -> None:
        self._pool = pool
        self._blocks_per_chunk = pool.pages_per_chunk // num_layers
        self._stride = num_layers * pool.num_chunks  # page index from one block of a chunk to the next
        self._free: dict[int, None] = {}  # an ordered set
        self._num_taken: dict[int, int] = {}  # chunk → blocks of it that are out

    def __len__(self) -> int:
        return len(self._free)

    @property
    def can_take(self) -> bool:
        return bool(self._free) or self._pool.num_free > 0

    def num_missing_chunks(self, num_blocks: int, num_reusable: int = 0) -> int:
        """Count the chunks that the pool must give for `num_blocks` blocks, `num_reusable` of them had elsewhere."""
        return ceil_div(max(0, num_blocks - len(self._free) - num_reusable), self._blocks_per_chunk)

    def take(self) -> int:
        """Hand out a block; the caller has seen that it `can_take`."""
        if not self._free:
            chunk = self._pool.take()
            self._num_taken[chunk] = 0
            self._free.update(dict.fromkeys(reversed(self._blocks_of(chunk))))
        block, _ = self._free.popitem()
        self._num_taken[block % self._pool.num_chunks] += 1
        return block

    def put(self, block: int) -> None:
        """Take a block back, and give its chunk to the pool once no block of it is out."""
        chunk = block % self._pool.num_chunks
        self._free[block] = None
        self._num_taken[chunk] -= 1
        if self._num_taken[chunk] == 0:
            for sibling in self._blocks_of(chunk):
                del self._free[sibling]
            del self._num_taken[chunk]
            self._pool.give_back(chunk)

    def _blocks_of(self, chunk: int) -> range:
        return range(chunk, chunk + self._blocks_per_chunk * self._stride, self._stride)
