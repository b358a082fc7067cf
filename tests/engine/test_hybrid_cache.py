"""Full and sliding blocks on one pool: they tile the same chunks, chunks follow the load, and everything adds up."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cbatch.engine.cache.build import build_cache, group_layers
from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import Admission, CacheManager
from cbatch.engine.cache.sliding import SlidingAttentionCacheAllocator
from cbatch.engine.request import Request
from cbatch.engine.step import ScheduledRequest, StepLimits, StepPlan
from tests.engine.fakes import FakeRunner, Harness, check_cache, completion, make_request, toy_model

MAX_MODEL_LEN = 64
MAX_BATCH_TOKENS = 6
LAYOUTS: list[list[int | None]] = [
    [4, None],  # as Gemma 2
    [4, 4, 4, 4, 4, None],  # as Gemma 3
    [4, 4, None, None, None],  # chunks of six pages: three sliding blocks or two full ones
    [4, 9, None],
    [4, 4, 9],  # no full layer at all
    [4, 4],  # one type, as Mistral
]


def make_hybrid(layout: list[int | None], num_blocks: int, page_size: int = 2) -> CacheManager:
    return build_cache(
        layout,
        num_blocks=num_blocks,
        page_size=page_size,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        allow_block_sharing=True,
    )


def make_hybrid_request(cache: CacheManager, request_id: int, num_tokens: int, max_tokens: int = 1) -> Request:
    tokens = [request_id % 5] * num_tokens
    return make_request(request_id, tokens, max_tokens, num_types=len(cache.allocators))


class HybridMachine(RuleBasedStateMachine):
    """Requests that come, compute, are moved out and end, in any order, each with a table of every type."""

    active = Bundle("active")

    @initialize(layout=st.sampled_from(LAYOUTS), num_blocks=st.integers(1, 25), page_size=st.sampled_from([1, 2, 4]))
    def make(self, layout: list[int | None], num_blocks: int, page_size: int) -> None:
        self.cache = make_hybrid(layout, num_blocks, page_size)
        self.runner = FakeRunner(self.cache)
        self.requests: list[Request] = []
        self.next_id = 0

    @rule(target=active, num_tokens=st.integers(1, 30), reserved=st.integers(0, 2))
    def join(self, num_tokens: int, reserved: int) -> Request:
        self.next_id += 1
        request = make_hybrid_request(self.cache, self.next_id, num_tokens)
        before = self.state()
        promised = [reserved] * len(self.cache.allocators)
        missing = self.cache.num_missing_blocks(request, num_tokens)
        admission = self.cache.admit(request, promised)
        assert (admission is Admission.JOINED) == self.fits([m + reserved for m in missing])
        assert self.state() == before, "admission alone takes nothing where nothing is shared"
        if admission is Admission.JOINED:
            self.requests.append(request)
        return request

    @rule(request=active, num_tokens=st.integers(1, MAX_BATCH_TOKENS))
    def compute(self, request: Request, num_tokens: int) -> None:
        if request not in self.requests:
            return
        start = request.num_computed_tokens
        stop = start + min(num_tokens, request.num_uncomputed)
        before, missing = self.state(), self.cache.num_missing_blocks(request, stop)
        if not self.cache.extend(request, stop):
            assert not self.fits(missing)
            assert self.state() == before, "some allocator kept what the others had no room for"
            return
        assert self.cache.num_missing_blocks(request, stop) == [0] * len(missing)
        reaches_end = stop == request.num_tokens
        sampled = self.runner.run(StepPlan([ScheduledRequest(request, stop - start, start, num_results=reaches_end)]))
        request.num_computed_tokens = stop
        self.cache.commit(request, start, stop)
        if sampled:
            request.token_ids.append(toy_model(request.token_ids))

    @rule(request=consumes(active), keep_content=st.booleans())
    def leave(self, request: Request, keep_content: bool) -> None:
        if request in self.requests:
            self.cache.release(request, keep_content=keep_content)
            self.requests.remove(request)
            assert request.tables == self.cache.make_tables()

    def state(self) -> object:
        free = [allocator.num_free_blocks for allocator in self.cache.allocators]
        return free, self.cache.pool.num_free, [[list(table) for table in r.tables] for r in self.requests]

    def fits(self, counts: list[int]) -> bool:
        """By hand: what each type has left in its own chunks, then whole chunks from the pool."""
        chunks = 0
        for allocator, count in zip(self.cache.allocators, counts, strict=True):
            per_chunk = self.cache.pool.pages_per_chunk // len(allocator.layers)
            while count > allocator.num_free_blocks:
                count -= per_chunk
                chunks += 1
        return chunks <= self.cache.pool.num_free

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "cache"):
            check_cache(self.cache, self.requests)
            pages = sum(
                len(t) * len(a.layers)
                for r in self.requests
                for t, a in zip(r.tables, self.cache.allocators, strict=True)
            )
            assert self.cache.usage == pytest.approx(pages / (self.cache.pool.num_usable * self.pages_per_chunk))
            if not self.requests:
                assert self.cache.pool.num_free == self.cache.pool.num_usable

    @property
    def pages_per_chunk(self) -> int:
        return self.cache.pool.pages_per_chunk


HybridMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHybridCacheUnderAnyOrderOfOperations = HybridMachine.TestCase


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_all_types_tile_the_same_chunks(layout: list[int | None]) -> None:
    cache = make_hybrid(layout, num_blocks=10)
    sizes = [len(allocator.layers) for allocator in cache.allocators]
    assert sum(sizes) == len(layout)
    assert cache.pool.pages_per_chunk == lcm(*sizes)
    assert sorted(layer for allocator in cache.allocators for layer in allocator.layers) == list(range(len(layout)))
    assert cache.pool.num_usable * cache.pool.pages_per_chunk >= 10 * len(layout)


def test_the_type_of_each_layer_is_the_models() -> None:
    cache = make_hybrid([4, 4, None, 9, 4], num_blocks=9)
    found = {allocator.layers: type(allocator) for allocator in cache.allocators}
    assert found == {
        (2,): FullAttentionCacheAllocator,
        (0, 1, 4): SlidingAttentionCacheAllocator,
        (3,): SlidingAttentionCacheAllocator,
    }


@pytest.mark.parametrize("window", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10**6])
def test_a_window_that_no_context_outgrows_is_none(window: int) -> None:
    assert group_layers([window, None], MAX_MODEL_LEN) == {None: (0, 1)}
    assert group_layers([MAX_MODEL_LEN - 1, None], MAX_MODEL_LEN).keys() == {None, MAX_MODEL_LEN - 1}


def test_chunks_move_from_one_type_to_the_other_as_load_shifts() -> None:
    """Many short requests need rings, one long one needs full blocks: the same chunks serve both."""
    cache = make_hybrid([4, 4, 4, 4, 4, None], num_blocks=30)
    full, sliding = cache.allocators
    total = cache.pool.num_usable

    def chunks_of(allocator: object) -> int:
        store = allocator._uninitialized if allocator is full else allocator._store  # type: ignore[attr-defined]
        return len(store._num_taken)

    short = [make_hybrid_request(cache, i, 4) for i in range(20)]
    joined = [r for r in short if cache.admit(r, [0, 0]) is Admission.JOINED and cache.extend(r, 4)]
    assert cache.pool.num_free < 3
    assert chunks_of(sliding) > total * 2 // 3
    for request in joined:
        cache.release(request)
    assert cache.pool.num_free == total
    long = make_hybrid_request(cache, 99, MAX_MODEL_LEN)
    assert cache.admit(long, [0, 0]) is Admission.JOINED
    assert cache.extend(long, MAX_MODEL_LEN)
    assert chunks_of(full) > chunks_of(sliding) > 0
    check_cache(cache, [long])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_host_pages", [0, 30, 10_000])
def test_with_one_block_to_spare_every_job_finishes(layout: list[int | None], num_host_pages: int) -> None:
    """Even where the blocks that others leave behind lie so that the last request does not fit between them."""
    num_tokens = 30
    cache = next(c for n in range(1, 200) if (c := make_hybrid(layout, n)).max_tokens_ever >= num_tokens + 1)
    all_pages = cache.pool.num_usable * cache.pool.pages_per_chunk
    harness = Harness(cache, StepLimits(MAX_BATCH_TOKENS, 4, all_pages), num_host_pages=num_host_pages)
    requests = [make_hybrid_request(cache, i, 3 + i, max_tokens=num_tokens - 2 - i) for i in range(10)]
    harness.add(*requests)
    harness.run(max_steps=10 * num_tokens)
    for request in requests:
        assert request.token_ids == request.prompt.token_ids + completion(request.prompt.token_ids, request.max_tokens)
    assert harness.num_soft_resets + harness.num_offloads > 0
    assert harness.num_soft_resets + harness.num_offloads <= harness.num_steps


def test_the_one_request_left_moves_only_to_pack_blocks_that_others_left_scattered() -> None:
    """Three sliding blocks or two full ones a chunk: leftovers of one type are no use to the other."""
    cache = make_hybrid([4, 4, None, None, None], num_blocks=9)
    all_pages = cache.pool.num_usable * cache.pool.pages_per_chunk
    harness = Harness(cache, StepLimits(MAX_BATCH_TOKENS, 8, all_pages), num_host_pages=10_000)
    long = make_hybrid_request(cache, 0, 2, max_tokens=cache.max_tokens_ever - 1)
    harness.add(long, *(make_hybrid_request(cache, i, 2, max_tokens=3) for i in range(1, 8)))
    packed = 0
    while harness.scheduler.has_work:
        plan = harness.step()
        if plan.moves.num_offloads and plan.moves.num_restores:
            assert [item.request for item in plan.items] == harness.scheduler.active == [long]
            packed += 1
    assert packed == 1
    assert long.num_tokens == cache.max_tokens_ever + 1
    assert long.recomputed_tokens == 0
