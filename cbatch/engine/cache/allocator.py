"""What the cache manager asks of the allocator of one attention type.

The manager is the only caller. An allocator decides how many blocks a request needs, hands them out, and tells the
batch builder where a step reads and writes; whether blocks can be shared is its own affair.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

# Logical block → block id (page index of the block's first layer). An array: a step takes its bytes as they are.
BlockTable: TypeAlias = "array[int]"


def make_table(blocks: Iterable[int] = ()) -> BlockTable:
    """Make a block table; int32, as kernels read it."""
    return array("i", blocks)


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """Where a step's tokens of one request find their context.

    `blocks` hold the tokens from position `start` on, in order; `start` is 0 unless old pages were recycled.
    """

    blocks: BlockTable
    start: int


class CacheAllocator(Protocol):
    """The blocks of all layers of one attention type."""

    page_size: int
    layers: tuple[int, ...]  # the model's layers that it serves, in order
    can_share: bool  # whether a completed block may serve several requests

    @property
    def num_free_blocks(self) -> int:
        """Blocks that it could hand out without another chunk from the pool."""

    @property
    def num_owned_blocks(self) -> int:
        """Blocks in at least one table, shared ones counted once."""

    def num_missing_blocks(self, table: BlockTable, num_tokens: int) -> int:
        """Count the blocks that `table` lacks to hold `num_tokens` tokens."""

    def num_slots(self, table: BlockTable) -> int:
        """Count the tokens that `table` can hold as it is."""

    def num_missing_chunks(self, num_blocks: int) -> int:
        """Count the chunks that it would have to take from the pool to hand out `num_blocks` blocks."""

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Grow `table` in place to hold `num_tokens` tokens; the manager has checked that there is room."""

    def release(self, table: BlockTable, *, keep_content: bool) -> None:
        """Take back all blocks of `table` and empty it in place; `keep_content` leaves completed ones findable."""

    def num_blocks_read(self, num_computed: int, num_tokens: int) -> int:
        """Count the blocks that such a step's `read_window` holds."""

    def read_window(self, table: BlockTable, num_computed: int, num_tokens: int) -> ReadWindow:
        """Tell where a step that brings a request from `num_computed` to `num_tokens` tokens finds its context."""

    def num_wasted_slots(self, table: BlockTable, num_computed: int) -> int:
        """Count the allocated slots of `table` that hold no token."""
