"""The cache under any order of operations: recounted after each one, with contents checked at every read."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import Admission, CacheManager
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbatch.engine.request import Request
from cbatch.engine.step import ScheduledRequest, StepPlan
from tests.engine.fakes import FakeRunner, check_cache, make_cache, make_request, toy_model


class CacheMachine(RuleBasedStateMachine):
    """Requests that come, compute some tokens, generate, are reset, fail and finish, in any order."""

    active = Bundle("active")
    out = Bundle("out")

    @initialize(
        num_chunks=st.integers(1, 6),
        page_size=st.sampled_from([1, 2, 4]),
        blocks_per_chunk=st.sampled_from([1, 2, 5]),
        num_layers=st.sampled_from([1, 3]),
        sharing=st.booleans(),
    )
    def make(self, num_chunks: int, page_size: int, blocks_per_chunk: int, num_layers: int, sharing: bool) -> None:
        self.cache = make_cache(
            num_chunks, page_size, blocks_per_chunk=blocks_per_chunk, num_layers=num_layers, sharing=sharing
        )
        self.num_blocks = num_chunks * blocks_per_chunk
        self.page_size = page_size
        self.runner = FakeRunner(self.cache)
        self.requests: list[Request] = []
        self.next_id = 0

    @rule(target=out, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def come(self, token_ids: list[int]) -> Request:
        self.next_id += 1
        return make_request(self.next_id, token_ids, 1)

    @rule(request=out, reserved=st.integers(0, 2))
    def try_to_join(self, request: Request, reserved: int) -> None:
        """Without effect where it is refused; `join` goes on where it is not."""
        free, initialized = self.num_free(), self.allocator.num_initialized_blocks
        if request not in self.requests and self.cache.admit(request, [reserved]) is not Admission.JOINED:
            assert request.tables == self.cache.make_tables()
            assert (self.num_free(), self.allocator.num_initialized_blocks) == (free, initialized)
        elif request not in self.requests:
            self.cache.release(request)
            request.num_computed_tokens = 0

    @rule(target=active, request=consumes(out), reserved=st.integers(0, 2))
    def join(self, request: Request, reserved: int) -> Request:
        admission = self.cache.admit(request, [reserved])
        if admission is Admission.AWAITS_PREFIX:
            prefix = request.num_tokens - 1
            assert any(
                other.token_ids[: self.page_size] == request.token_ids[: self.page_size]
                for other in self.requests
                if other.num_tokens >= self.page_size <= prefix
            )
        if admission is Admission.NO_ROOM:
            assert self.requests or -(-request.num_tokens // self.page_size) + reserved > self.num_blocks
        if admission is not Admission.JOINED:
            return request
        assert request.num_computed_tokens < request.num_tokens
        assert request.num_computed_tokens == len(request.tables[0]) * self.page_size
        missing = self.cache.num_missing_blocks(request, request.num_tokens)
        assert missing[0] + reserved <= self.num_free()
        self.requests.append(request)
        return request

    @rule(request=active, num_tokens=st.integers(1, 6))
    def compute(self, request: Request, num_tokens: int) -> None:
        if request not in self.requests:
            return
        before = request.num_computed_tokens
        num_tokens = min(num_tokens, request.num_uncomputed)
        table, free = request.tables[0][:], self.num_free()
        if not self.cache.extend(request, before + num_tokens):
            assert request.tables == [table]
            assert -(-(before + num_tokens) // self.page_size) - len(table) > free
            return
        reaches_end = num_tokens == request.num_uncomputed
        sampled = self.runner.run(StepPlan([ScheduledRequest(request, num_tokens, before, num_results=reaches_end)]))
        request.num_computed_tokens += num_tokens
        self.cache.commit(request, before, before + num_tokens)
        if sampled:
            request.token_ids.append(toy_model(request.token_ids) % 2)

    @rule(target=out, request=consumes(active))
    def soft_reset(self, request: Request) -> Request:
        if request in self.requests:
            self.leave(request, failed=False)
        return request

    @rule(request=consumes(active), failed=st.booleans())
    def end(self, request: Request, failed: bool) -> None:
        if request in self.requests:
            self.leave(request, failed=failed)

    def leave(self, request: Request, *, failed: bool) -> None:
        blocks = list(request.tables[0])
        self.cache.release(request, keep_content=not failed)
        self.requests.remove(request)
        request.num_computed_tokens = 0
        assert request.tables == self.cache.make_tables()
        if failed:
            assert not any(self.allocator.index.holds(block) for block in blocks)

    @property
    def allocator(self) -> FullAttentionCacheAllocator:
        allocator = self.cache.allocators[0]
        assert isinstance(allocator, FullAttentionCacheAllocator)
        return allocator

    def num_free(self) -> int:
        """Blocks that can be had, by the states of all blocks."""
        return self.num_blocks - self.allocator.num_owned_blocks

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_cache(self.cache, self.requests)
        owned = {block for request in self.requests for block in request.tables[0]}
        assert self.cache.usage == pytest.approx(len(owned) / self.num_blocks)
        for count in range(self.num_blocks + 2):
            assert self.cache.has_room([count]) == (count <= self.num_free())
        announced = {d for r in self.requests for d in r.block_hashes[r.num_computed_tokens // self.page_size :]}
        assert self.cache._in_flight.keys() <= announced
        self.waste_is_what_no_token_fills(owned)

    def waste_is_what_no_token_fills(self, owned: set[int]) -> None:
        filled = {
            (request.tables[0][position // self.page_size], position % self.page_size)
            for request in self.requests
            for position in range(request.num_computed_tokens)
        }
        waste = self.cache.waste_fraction({request: request.num_computed_tokens for request in self.requests})
        if owned:
            assert waste == pytest.approx(1 - len(filled) / (len(owned) * self.page_size))
        else:
            assert waste is None


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheUnderAnyOrderOfOperations = CacheMachine.TestCase


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layer_counts", [(1,), (2,), (1, 2), (2, 3)])
def test_max_tokens_ever_is_the_most_that_a_request_alone_can_hold(
    page_size: int, layer_counts: tuple[int, ...]
) -> None:
    pool = CachePool(5 + NUM_RESERVED_CHUNKS, pages_per_chunk=6)
    allocators = [FullAttentionCacheAllocator(pool, tuple(range(n)), page_size) for n in layer_counts]
    cache = CacheManager(pool, list(allocators), allow_block_sharing=False)
    most = cache.max_tokens_ever
    for num_tokens, fits in ((most, True), (most + 1, False)):
        request = make_request(num_tokens, [0] * num_tokens, 1)
        request.tables = cache.make_tables()
        nothing = [0] * len(layer_counts)
        assert (cache.admit(request, nothing) is Admission.JOINED) == fits
        assert cache.extend(request, num_tokens) == fits
        cache.release(request)


def test_sharing_is_off_where_not_every_attention_type_can_share() -> None:
    pool = CachePool(20 + NUM_RESERVED_CHUNKS, pages_per_chunk=2)
    allocators = [FullAttentionCacheAllocator(pool, (layer,), page_size=2) for layer in range(2)]
    cache = CacheManager(pool, list(allocators), allow_block_sharing=True)
    for request_id in range(2):
        request = make_request(request_id, range(9), 1)
        request.tables = cache.make_tables()
        assert cache.admit(request, [0, 0]) is Admission.JOINED
        assert request.num_computed_tokens == 0
        assert cache.extend(request, 9)
        request.num_computed_tokens = 9
        cache.commit(request, 0, 9)
        cache.release(request)
