"""Blocks of sliding-window layers: a request keeps the last window's tokens in a small ring of pages.

Logical block b of a request lies in ring place b mod ring size. The ring holds what one step can need at once: the
window before the step's first token, and the step's own tokens. It is never shared.
"""

from __future__ import annotations

import sys

from cbatch.engine.cache.allocator import BlockTable, ReadWindow, make_table
from cbatch.engine.cache.pool import CachePool
from cbatch.engine.cache.store import BlockStore
from cbatch.units import ceil_div


class SlidingAttentionCacheAllocator:
    """Hands out the blocks of the layers that attend to the last `window` tokens only."""

    can_share = False

    def __init__(
        self, pool: CachePool, layers: tuple[int, ...], page_size: int, *, window: int, max_batch_tokens: int
    ) -> None:
        self.page_size = page_size
        self.layers = layers
        self._window = window
        # The most pages that so many tokens in a row lie in: the first may be the last of its page.
        num_tokens = window - 1 + max_batch_tokens
        self._ring_size = ceil_div(num_tokens - 1, page_size) + 1
        self._store = BlockStore(pool, len(layers))
        self._num_owned = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._store)

    @property
    def num_owned_blocks(self) -> int:
        return self._num_owned

    def num_missing_blocks(self, table: BlockTable, num_tokens: int) -> int:
        return max(0, min(ceil_div(num_tokens, self.page_size), self._ring_size) - len(table))

    def num_slots(self, table: BlockTable) -> int:
        return sys.maxsize if len(table) == self._ring_size else len(table) * self.page_size

    def num_missing_chunks(self, num_blocks: int) -> int:
        return self._store.num_missing_chunks(num_blocks)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        missing = self.num_missing_blocks(table, num_tokens)
        table.extend(self._store.take() for _ in range(missing))
        self._num_owned += missing

    def release(self, table: BlockTable, *, keep_content: bool) -> None:
        for block in table:
            self._store.put(block)
        self._num_owned -= len(table)
        del table[:]

    def num_blocks_read(self, num_computed: int, num_tokens: int) -> int:
        return len(self._logical_blocks(num_computed, num_tokens))

    def read_window(self, table: BlockTable, num_computed: int, num_tokens: int) -> ReadWindow:
        blocks = self._logical_blocks(num_computed, num_tokens)
        assert len(blocks) <= self._ring_size, "a step may not outrun the ring"
        window = make_table(table[block % self._ring_size] for block in blocks)
        return ReadWindow(window, start=blocks.start * self.page_size)

    def num_wasted_slots(self, table: BlockTable, num_computed: int) -> int:
        return max(0, len(table) * self.page_size - num_computed)

    def _logical_blocks(self, num_computed: int, num_tokens: int) -> range:
        """From the window of the step's first token to its last token."""
        first = max(0, num_computed - self._window + 1) // self.page_size
        return range(first, ceil_div(num_tokens, self.page_size))
