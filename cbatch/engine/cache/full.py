"""Blocks of full-attention layers: one per page_size tokens, kept until the request ends, shared where equal.

A block is in one of four states:

    unallocated     its chunk is in the pool
    uninitialized   its chunk is ours, nobody owns it, its content means nothing
    owned           in the block tables of one or more requests (reference counted)
    initialized     nobody owns it, but content and hash are kept for a later match

Initialized blocks are a best-effort layer: they are demoted, newest first and so children before their parents,
as soon as nothing else is left.
"""

from __future__ import annotations

from cbatch.engine.cache.allocator import BlockTable, ReadWindow
from cbatch.engine.cache.pool import CachePool
from cbatch.engine.cache.prefix import PrefixIndex
from cbatch.engine.cache.store import BlockStore
from cbatch.units import ceil_div


class FullAttentionCacheAllocator:
    """Hands out the blocks of the layers that attend to the whole context."""

    can_share = True

    def __init__(self, pool: CachePool, layers: tuple[int, ...], page_size: int) -> None:
        self.page_size = page_size
        self.layers = layers
        self.index = PrefixIndex()
        self._uninitialized = BlockStore(pool, len(layers))
        self._initialized: dict[int, None] = {}  # in the order in which they were freed
        self._ref_counts: dict[int, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._uninitialized) + len(self._initialized)

    @property
    def num_owned_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_initialized_blocks(self) -> int:
        return len(self._initialized)

    def ref_count(self, block: int) -> int:
        """Count the tables that hold `block`."""
        return self._ref_counts.get(block, 0)

    def num_missing_blocks(self, table: BlockTable, num_tokens: int) -> int:
        return max(0, ceil_div(num_tokens, self.page_size) - len(table))

    def num_slots(self, table: BlockTable) -> int:
        return len(table) * self.page_size

    def num_missing_chunks(self, num_blocks: int) -> int:
        return self._uninitialized.num_missing_chunks(num_blocks, len(self._initialized))

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        for _ in range(self.num_missing_blocks(table, num_tokens)):
            block = self._take_block()
            self._ref_counts[block] = 1
            table.append(block)

    def share(self, table: BlockTable, blocks: list[int]) -> None:
        """Append blocks found by `index` to `table`, whoever else owns them."""
        for block in blocks:
            self._initialized.pop(block, None)
            self._ref_counts[block] = self._ref_counts.get(block, 0) + 1
            table.append(block)

    def num_initialized_among(self, blocks: list[int]) -> int:
        """Count those of `blocks` that nobody owns: sharing them takes them out of the free ones."""
        return sum(block in self._initialized for block in blocks)

    def release(self, table: BlockTable, *, keep_content: bool) -> None:
        for block in table:  # parents first, so that children are the newest
            # What is not to be kept is not to be found either while others still hold it.
            if not keep_content and self.index.holds(block):
                self.index.forget(block)
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            del self._ref_counts[block]
            if self.index.holds(block):
                self._initialized[block] = None
            else:
                self._uninitialized.put(block)
        del table[:]

    def num_blocks_read(self, num_computed: int, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)  # called for every request of every step

    def read_window(self, table: BlockTable, num_computed: int, num_tokens: int) -> ReadWindow:
        num_blocks = self.num_blocks_read(num_computed, num_tokens)
        return ReadWindow(table if len(table) == num_blocks else table[:num_blocks], 0)

    def num_wasted_slots(self, table: BlockTable, num_computed: int) -> int:
        # Shared blocks are full, so the empty slots of two tables are never the same ones.
        return max(0, len(table) * self.page_size - num_computed)

    def _take_block(self) -> int:
        if not self._uninitialized.can_take:
            block, _ = self._initialized.popitem()
            self.index.forget(block)
            self._uninitialized.put(block)
        return self._uninitialized.take()
