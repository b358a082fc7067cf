"""The ring of a sliding-window layer against a list of which positions a step needs, and what lies where."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.engine.cache.allocator import BlockTable, make_table
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbatch.engine.cache.sliding import SlidingAttentionCacheAllocator


class Ring:
    """One request's blocks, with the position that was last written to every slot."""

    def __init__(self, page_size: int, window: int, max_batch_tokens: int, num_chunks: int = 200) -> None:
        self.page_size, self.window = page_size, window
        self.pool = CachePool(num_chunks + NUM_RESERVED_CHUNKS, pages_per_chunk=2)
        self.allocator = SlidingAttentionCacheAllocator(
            self.pool, (0,), page_size, window=window, max_batch_tokens=max_batch_tokens
        )
        self.table: BlockTable = make_table()
        self.held: dict[tuple[int, int], int] = {}  # (block, offset) → position
        self.num_computed = 0

    def step(self, num_tokens: int, *, fails: bool = False) -> None:
        """Write the step's tokens and look up all that they attend to; a step that `fails` leaves only its writes."""
        start, stop = self.num_computed, self.num_computed + num_tokens
        self.allocator.extend(self.table, stop)
        assert self.allocator.num_missing_blocks(self.table, stop) == 0
        window = self.allocator.read_window(self.table, start, stop)
        assert len(window.blocks) == self.allocator.num_blocks_read(start, stop) == len(set(window.blocks))
        assert set(window.blocks) <= set(self.table)
        needed = {p for query in range(start, stop) for p in range(query + 1) if query - p < self.window}
        # Every page read holds a position that is needed, and the last one ends the step.
        first_pages = {position // self.page_size for position in needed}
        assert window.start == min(first_pages) * self.page_size
        assert len(window.blocks) == len(first_pages)

        def slot(position: int) -> tuple[int, int]:
            at = position - window.start
            return window.blocks[at // self.page_size], at % self.page_size

        for position in range(start, stop):
            self.held[slot(position)] = position
        for position in needed:
            assert self.held[slot(position)] == position, f"{position} is no longer there at {start}:{stop}"
        if not fails:
            self.num_computed = stop


@settings(max_examples=300, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    window=st.integers(1, 40),
    max_batch_tokens=st.integers(1, 40),
    chunks=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=40),
)
def test_a_step_finds_every_position_in_its_window_and_no_page_beyond_it(
    page_size: int, window: int, max_batch_tokens: int, chunks: list[tuple[int, bool]]
) -> None:
    ring = Ring(page_size, window, max_batch_tokens)
    for num_tokens, fails in chunks:
        ring.step(min(num_tokens, max_batch_tokens), fails=fails)
        if fails:  # and is tried again with half as much
            ring.step(max(1, min(num_tokens, max_batch_tokens) // 2))
    # The window and a chunk, and what the two ends leave of their pages.
    assert len(ring.table) * page_size <= window + max_batch_tokens + 2 * page_size
    assert ring.allocator.num_owned_blocks == len(ring.table)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_ring_is_as_small_as_window_and_chunk_allow(page_size: int) -> None:
    """One block less, and some step would not find its window."""
    window, max_batch_tokens = 3 * page_size, 2 * page_size
    ring = Ring(page_size, window, max_batch_tokens)
    rng = random.Random(page_size)
    needed = 0
    while ring.num_computed < 100 * page_size:
        start, num_tokens = ring.num_computed, rng.randint(1, max_batch_tokens)
        ring.step(num_tokens)
        needed = max(needed, ring.allocator.num_blocks_read(start, start + num_tokens))
    assert len(ring.table) == needed


def test_a_short_request_takes_no_more_than_its_tokens() -> None:
    ring = Ring(page_size=4, window=40, max_batch_tokens=64)
    ring.step(9)
    assert len(ring.table) == 3
    assert ring.allocator.num_wasted_slots(ring.table, 9) == 3


def test_a_long_request_takes_a_fixed_number_of_blocks_and_gives_them_back() -> None:
    ring = Ring(page_size=4, window=16, max_batch_tokens=8)
    sizes = []
    for _ in range(500):
        ring.step(1)
        sizes.append(len(ring.table))
    assert sizes == sorted(sizes)
    assert sizes[-1] == 7  # 15 + 8 tokens in six pages, and one for where they begin
    assert ring.allocator.num_missing_blocks(ring.table, 10**9) == 0
    assert ring.allocator.num_wasted_slots(ring.table, 500) == 0
    ring.allocator.release(ring.table, keep_content=True)
    assert ring.table == make_table()
    assert ring.allocator.num_owned_blocks == ring.allocator.num_free_blocks == 0
    assert ring.pool.num_free == ring.pool.num_usable


def test_the_window_of_one_is_the_token_itself() -> None:
    ring = Ring(page_size=2, window=1, max_batch_tokens=1)
    for _ in range(9):
        ring.step(1)
    assert ring.allocator.num_blocks_read(8, 9) == 1


def test_generation_past_the_window_and_a_block_more_is_the_same_twice() -> None:
    """A slot's validity follows from the position, not from where in the ring it lies."""
    tables = []
    for _ in range(2):
        ring = Ring(page_size=4, window=16, max_batch_tokens=10)
        ring.step(10)
        for _ in range(60):
            ring.step(1)
        tables.append(ring.allocator.read_window(ring.table, 69, 70))
    assert tables[0] == tables[1]
    assert tables[0].start == 52  # of positions 54 to 69


def test_it_offers_no_sharing() -> None:
    assert not Ring(4, 16, 8).allocator.can_share
