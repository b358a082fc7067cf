"""Blocks of full attention: every state change, with several attention types on one pool."""

import random

import pytest

from cbatch.engine.cache.allocator import make_table
from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbatch.engine.request import Request
from tests.engine.fakes import check_cache, make_request


def make_allocator(num_chunks: int, blocks_per_chunk: int = 1, page_size: int = 4) -> FullAttentionCacheAllocator:
    pool = CachePool(num_chunks + NUM_RESERVED_CHUNKS, pages_per_chunk=blocks_per_chunk)
    return FullAttentionCacheAllocator(pool, (0,), page_size)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_allocators_with_different_layer_counts_never_overlap_on_one_pool(blocks_per_chunk: int, seed: int) -> None:
    rng = random.Random(seed)
    layer_counts = [1, 2, 3]
    pool = CachePool(12 + NUM_RESERVED_CHUNKS, pages_per_chunk=6 * blocks_per_chunk)
    allocators = [FullAttentionCacheAllocator(pool, tuple(range(n)), page_size=n + 1) for n in layer_counts]
    cache = CacheManager(pool, list(allocators), allow_block_sharing=True)
    requests: list[Request] = []
    refused = 0
    for request_id in range(300):
        if requests and rng.random() < 0.4:
            cache.release(requests.pop(rng.randrange(len(requests))), keep_content=rng.random() < 0.5)
        else:
            request = make_request(request_id, [0], 1)
            request.tables = [make_table() for _ in range(3)]
            requests.append(request)
        request = rng.choice(requests) if requests else make_request(request_id, [0], 1)
        before = [table[:] for table in request.tables]
        num_tokens = rng.randrange(1, 60)
        if request in requests and not cache.extend(request, num_tokens):
            refused += 1
            assert request.tables == before, "all tables grow or none"
        check_cache(cache, requests)
        used_chunks = sum(len({block % pool.num_chunks for r in requests for block in r.tables[i]}) for i in range(3))
        assert used_chunks + pool.num_free == 12
    assert refused > 0
    for request in requests:
        cache.release(request)
    assert (pool.num_free, cache.usage) == (12, 0)


def test_a_table_grows_block_by_block() -> None:
    allocator = make_allocator(3)
    table = make_table()
    for num_tokens, num_blocks in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        allocator.extend(table, num_tokens)
        assert len(table) == num_blocks
    assert allocator.num_missing_blocks(table, 13) == 1
    assert allocator.num_wasted_slots(table, 9) == 3


def test_freed_blocks_are_demoted_newest_first_and_only_when_nothing_else_is_left() -> None:
    allocator = make_allocator(4)
    table = make_table()
    allocator.extend(table, 12)
    parent, child, grandchild = table
    digests = [bytes([i]) * 16 for i in range(3)]
    for digest, block in zip(digests, table, strict=True):
        allocator.index.register(digest, block)
    allocator.release(table, keep_content=True)
    assert table == make_table()
    assert (allocator.num_free_blocks, allocator.num_initialized_blocks) == (3, 3)

    other: list[int] = []
    allocator.extend(other, 4)  # the fourth block was never used
    assert allocator.index.match(digests) == [parent, child, grandchild]
    allocator.extend(other, 8)
    assert allocator.index.match(digests) == [parent, child]
    allocator.extend(other, 12)
    assert allocator.index.match(digests) == [parent]


def test_a_shared_block_outlives_its_first_owner() -> None:
    allocator = make_allocator(2)
    first: list[int] = []
    second: list[int] = []
    allocator.extend(first, 4)
    (block,) = first
    allocator.index.register(b"x" * 16, block)
    allocator.share(second, [block])
    assert allocator.ref_count(block) == 2
    assert allocator.num_owned_blocks == 1
    allocator.release(first, keep_content=True)
    assert (allocator.ref_count(block), allocator.num_initialized_blocks) == (1, 0)
    allocator.release(second, keep_content=True)
    assert (allocator.ref_count(block), allocator.num_initialized_blocks) == (0, 1)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 5])
def test_an_empty_chunk_goes_back_to_the_pool(blocks_per_chunk: int) -> None:
    pool = CachePool(4 + NUM_RESERVED_CHUNKS, pages_per_chunk=blocks_per_chunk)
    allocator = FullAttentionCacheAllocator(pool, (0,), page_size=1)
    table = make_table()
    assert allocator.num_missing_chunks(blocks_per_chunk + 1) == 2
    allocator.extend(table, blocks_per_chunk + 1)
    assert pool.num_free == 2
    assert allocator.num_free_blocks == blocks_per_chunk - 1
    allocator.release(table, keep_content=True)  # none is indexed, so none is kept
    assert (pool.num_free, allocator.num_free_blocks) == (4, 0)


def test_what_a_failed_request_computed_is_found_no_more_though_another_still_holds_it() -> None:
    allocator = make_allocator(3)
    failed: list[int] = []
    sharer: list[int] = []
    allocator.extend(failed, 8)
    for digest, block in zip((b"a" * 16, b"b" * 16), failed, strict=True):
        allocator.index.register(digest, block)
    allocator.share(sharer, failed[:1])
    allocator.release(failed, keep_content=False)
    assert len(allocator.index) == 0
    allocator.release(sharer, keep_content=True)
    assert allocator.num_initialized_blocks == 0
