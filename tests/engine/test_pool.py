"""The pool hands out chunks, never the two that padding reads and writes."""

import pytest

from cbatch.engine.cache.pool import PADDING_READ_CHUNK, PADDING_WRITE_CHUNK, CachePool


def test_every_chunk_but_the_reserved_ones_is_handed_out_once() -> None:
    pool = CachePool(num_chunks=7, pages_per_chunk=4)
    assert pool.num_free == pool.num_usable == 5
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == [2, 3, 4, 5, 6]
    assert {PADDING_READ_CHUNK, PADDING_WRITE_CHUNK}.isdisjoint(taken)
    assert pool.num_free == 0
    pool.give_back(4)
    assert pool.take() == 4


def test_low_chunks_go_first_so_that_unneeded_memory_is_never_touched() -> None:
    pool = CachePool(num_chunks=100, pages_per_chunk=1)
    assert [pool.take() for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("chunk", [PADDING_READ_CHUNK, PADDING_WRITE_CHUNK, 7])
def test_a_chunk_that_was_never_handed_out_is_not_taken_back(chunk: int) -> None:
    with pytest.raises(AssertionError):
        CachePool(num_chunks=7, pages_per_chunk=1).give_back(chunk)
