"""Requests, a model and a KV store that need no torch: what scheduling does is checked by what would be computed.

`FakeRunner` stands in for the model runner. It writes into every slot that a step computes a fingerprint of the
tokens up to there, and checks before sampling that every slot of a request's context holds the right one. A stale
shared block, a wrong table, a slot never written or freed too early all show at the step where they happen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbatch.config import SamplingParams
from cbatch.engine.cache.allocator import CacheAllocator
from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbatch.engine.cache.sliding import SlidingAttentionCacheAllocator
from cbatch.engine.cache.store import BlockStore
from cbatch.engine.modes import CHUNKED, MODES, Mode
from cbatch.engine.request import Prompt, Request, RequestStatus
from cbatch.engine.speculation import Results, accept
from cbatch.engine.step import FinishedRequest, ScheduledRequest, StepLimits, StepPlan
from cbatch.engine.stopping import StopCondition
from cbatch.errors import RowError

VOCAB_SIZE = 7
EOS = 0


def make_cache(
    num_chunks: int, page_size: int, *, blocks_per_chunk: int = 1, num_layers: int = 1, sharing: bool = True
) -> CacheManager:
    """A cache of `num_chunks` usable chunks for one attention type."""
    pool = CachePool(num_chunks + NUM_RESERVED_CHUNKS, pages_per_chunk=blocks_per_chunk * num_layers)
    allocator = FullAttentionCacheAllocator(pool, tuple(range(num_layers)), page_size)
    return CacheManager(pool, [allocator], allow_block_sharing=sharing)


def make_request(
    request_id: int,
    token_ids: Sequence[int],
    max_tokens: int,
    *,
    eos: bool = False,
    created_at: float = 0.0,
    num_types: int = 1,
) -> Request:
    """A request as the engine queues it, for `num_types` attention types."""
    return Request(
        prompt=Prompt(request_id, list(token_ids), SamplingParams(max_tokens=max_tokens)),
        max_tokens=max_tokens,
        created_at=created_at,
        stopping=StopCondition(frozenset({EOS}) if eos else frozenset(), strings=None),
        token_ids=list(token_ids),
        tables=[[] for _ in range(num_types)],
    )


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """One number per token that stands for it and all before it, as its KV does."""
    result: list[int] = []
    state = 0
    for token in token_ids:
        state = hash((state, token))
        result.append(state)
    return result


def toy_model(token_ids: Sequence[int]) -> int:
    """The next token: depends on the whole history."""
    return fingerprints(token_ids)[-1] % VOCAB_SIZE


def completion(token_ids: Sequence[int], max_tokens: int, *, eos: bool = False) -> list[int]:
    """What the toy model generates where nothing is scheduled, cached or shared."""
    history = list(token_ids)
    for _ in range(max_tokens):
        history.append(toy_model(history))
        if eos and history[-1] == EOS:
            break
    return history[len(token_ids) :]


@dataclass
class FakeRunner:
    """Computes steps with the toy model over a KV store of fingerprints."""

    cache: CacheManager
    failing: dict[int, int] = field(default_factory=dict)  # request id → tokens that it generates before it fails
    num_computed: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    _pages: dict[int, list[object]] = field(default_factory=dict)
    _host_pages: dict[int, list[object]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[Results]:
        out, back = plan.moves.out, plan.moves.back
        for page, host_page in zip(out.cache_pages, out.host_pages, strict=True):
            assert host_page not in self._host_pages, "overwrites what has not come back"
            self._host_pages[host_page] = list(self._pages[page])
        self._poison_free_pages()
        shared = self._shared_pages()
        for page, host_page in zip(back.cache_pages, back.host_pages, strict=True):
            assert page not in shared, "copies back what is in the cache"
            self._pages[page] = list(self._host_pages[host_page])
        for item in plan.items:
            self._write(item)
        for item in plan.items:
            self._check_context(item)
        return [self._sample(item) for item in plan.items if item.num_results]

    def keep_on_host(self, host_pages: set[int]) -> None:
        """Lose every other page of the host's."""
        assert host_pages <= self._host_pages.keys()
        self._host_pages = {page: held for page, held in self._host_pages.items() if page in host_pages}

    def _sample(self, item: ScheduledRequest) -> Results:
        request = item.request
        results: Results = []
        for i in range(item.num_results):
            failed = self.failing.get(request.request_id) == request.num_generated + i
            failure = RowError("failed", "as the test wants it")
            results.append(failure if failed else toy_model([*request.token_ids, *item.drafts[:i]]))
        taken = accept(item.drafts, results)
        self.num_drafted += len(item.drafts)
        self.num_accepted += len(taken) - 1
        return taken

    def _write(self, item: ScheduledRequest) -> None:
        request, start, stop = item.request, item.num_computed_before, item.num_computed_before + item.num_tokens
        self.num_computed += item.num_tokens
        values = fingerprints(step_tokens(item))
        for allocator, table in zip(self.cache.allocators, request.tables, strict=True):
            size = allocator.page_size
            window = allocator.read_window(table, start, stop)
            for position in range(start, stop):
                block = window.blocks[(position - window.start) // size]
                if isinstance(allocator, FullAttentionCacheAllocator):
                    assert allocator.ref_count(block) == 1, "writes into a block that another request reads"
                    assert not allocator.index.holds(block), "writes into a block that others may find"
                for layer, page in zip(allocator.layers, self.pages_of(block, len(allocator.layers)), strict=True):
                    self._pages.setdefault(page, [None] * size)[position % size] = (layer, values[position])

    def _check_context(self, item: ScheduledRequest) -> None:
        request, start, stop = item.request, item.num_computed_before, item.num_computed_before + item.num_tokens
        values = fingerprints(step_tokens(item))
        for allocator, table in zip(self.cache.allocators, request.tables, strict=True):
            size = allocator.page_size
            window = allocator.read_window(table, start, stop)
            assert len(window.blocks) == allocator.num_blocks_read(start, stop)
            first = 0
            if isinstance(allocator, SlidingAttentionCacheAllocator):
                first = max(0, start + 1 - allocator._window)
            assert window.start <= first
            for i, block in enumerate(window.blocks):
                begin = window.start + i * size
                seen = slice(max(0, first - begin), min(size, stop - begin))
                expected = values[begin : begin + size][seen]
                for layer, page in zip(allocator.layers, self.pages_of(block, len(allocator.layers)), strict=True):
                    held = self._pages.get(page, [])[seen]
                    assert held == [(layer, value) for value in expected], f"block {i} of {request.request_id} is wrong"

    def pages_of(self, block: int, num_layers: int) -> list[int]:
        """The page of every layer of a block, by the drawing in pool.py."""
        return [block + lane * self.cache.pool.num_chunks for lane in range(num_layers)]

    def _shared_pages(self) -> set[int]:
        """The pages that others read, or may find."""
        return {
            page
            for allocator in self.cache.allocators
            if isinstance(allocator, FullAttentionCacheAllocator)
            for block in _blocks_in_use(allocator)
            if allocator.ref_count(block) != 1 or allocator.index.holds(block)
            for page in self.pages_of(block, len(allocator.layers))
        }

    def _poison_free_pages(self) -> None:
        """Lose the content of every block that is neither in a table nor findable."""
        kept: set[int] = set()
        for allocator in self.cache.allocators:
            for block in _blocks_in_use(allocator):
                kept.update(self.pages_of(block, len(allocator.layers)))
        self._pages = {page: held for page, held in self._pages.items() if page in kept}


def step_tokens(item: ScheduledRequest) -> list[int]:
    """All tokens of a request up to the last one that a step computes, drafts included."""
    num_own = item.num_computed_before + item.num_tokens - len(item.drafts)
    return [*item.request.token_ids[:num_own], *item.drafts]


def _store_of(allocator: CacheAllocator) -> BlockStore:
    if isinstance(allocator, FullAttentionCacheAllocator):
        return allocator._uninitialized
    assert isinstance(allocator, SlidingAttentionCacheAllocator)
    return allocator._store


def _blocks_in_use(allocator: CacheAllocator) -> list[int]:
    """All blocks of the allocator's chunks but the uninitialized ones."""
    store = _store_of(allocator)
    return [block for chunk in store._num_taken for block in store._blocks_of(chunk) if block not in store._free]


def check_cache(cache: CacheManager, requests: Sequence[Request]) -> None:
    """Recount the whole cache from the tables of all unfinished `requests`."""
    pool = cache.pool
    for request in requests:
        assert not any(cache.num_missing_blocks(request, request.num_slots)), "has less room than it says"
        assert request.num_slots == sys.maxsize or any(cache.num_missing_blocks(request, request.num_slots + 1))
    chunks = list(pool._free)
    pages: list[int] = []
    for i, allocator in enumerate(cache.allocators):
        num_layers, tables = len(allocator.layers), [request.tables[i] for request in requests]
        assert all(len(set(table)) == len(table) for table in tables)
        owned = Counter(block for table in tables for block in table)
        assert allocator.num_owned_blocks == len(owned)
        initialized: set[int] = set()
        if isinstance(allocator, FullAttentionCacheAllocator):
            assert allocator._ref_counts == dict(owned)
            initialized = set(allocator._initialized)
            _check_index(allocator, owned, initialized)
        else:
            assert all(count == 1 for count in owned.values())
        store = _store_of(allocator)
        uninitialized = set(store._free)
        blocks = [*owned, *initialized, *uninitialized]
        assert len(set(blocks)) == len(blocks), "a block is in two states"
        assert allocator.num_free_blocks == len(initialized) + len(uninitialized)
        # The chunks that it has are wholly cut into blocks, and one that nothing is in has gone back.
        in_use = Counter(block % pool.num_chunks for block in [*owned, *initialized])
        assert store._num_taken == dict(in_use)
        per_chunk, stride = pool.pages_per_chunk // num_layers, num_layers * pool.num_chunks
        assert set(blocks) == {chunk + k * stride for chunk in in_use for k in range(per_chunk)}
        chunks += in_use
        pages += [block + lane * pool.num_chunks for block in blocks for lane in range(num_layers)]
        _check_shared(allocator.page_size, i, requests)
    assert sorted(chunks) == list(range(NUM_RESERVED_CHUNKS, pool.num_chunks)), "a chunk is lost, doubled or reserved"
    assert len(set(pages)) == len(pages), "two blocks overlap"
    assert all(page < pool.num_chunks * pool.pages_per_chunk for page in pages)
    assert all(page % pool.num_chunks >= NUM_RESERVED_CHUNKS for page in pages)


def _check_index(allocator: FullAttentionCacheAllocator, owned: Counter[int], initialized: set[int]) -> None:
    known = allocator.index._hash_of
    assert {digest: block for block, digest in known.items()} == allocator.index._block_of
    assert initialized <= known.keys() <= initialized | owned.keys()


def _check_shared(page_size: int, type_index: int, requests: Sequence[Request]) -> None:
    """A block in several tables is complete, and at the end of the same tokens in all of them."""
    holders: dict[int, list[tuple[Request, int]]] = {}
    for request in requests:
        for at, block in enumerate(request.tables[type_index]):
            holders.setdefault(block, []).append((request, (at + 1) * page_size))
    for held in holders.values():
        if len(held) > 1:
            assert len({tuple(request.token_ids[:end]) for request, end in held}) == 1
            assert all(request.num_computed_tokens >= end == len(request.token_ids[:end]) for request, end in held)


@dataclass
class Harness:
    """A scheduler driven step by step over the fake runner, everything checked at every step."""

    cache: CacheManager
    limits: StepLimits
    failing: dict[int, int] = field(default_factory=dict)
    policy: str = "fifo"
    safety_margin: float = 0.0
    num_host_pages: int = 0
    mode: Mode = MODES[CHUNKED]
    num_steps: int = 0
    num_soft_resets: int = 0
    num_offloads: int = 0
    num_restores: int = 0
    finished: list[FinishedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self.mode.make_scheduler(
            self.policy,
            self.cache,
            self.limits,
            safety_margin=self.safety_margin,
            num_host_pages=self.num_host_pages,
        )
        self.runner = FakeRunner(self.cache, self.failing)
        self._requests: dict[int, Request] = {}
        self._started: dict[int, float] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self._requests[request.request_id] = request
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        """Schedule, run, update; the time is the number of the step, and half a step later when it has run."""
        plan = self.scheduler.schedule(float(self.num_steps))
        self.num_steps += 1
        self.num_soft_resets += plan.moves.num_soft_resets
        self.num_offloads += plan.moves.num_offloads
        self.num_restores += plan.moves.num_restores
        self._check_plan(plan)
        check_cache(self.cache, list(self._requests.values()))
        sampled = self.runner.run(plan)
        self._check_host_pages()
        finished = self.scheduler.update(plan, sampled, self.num_steps - 0.5)
        for request in (f.request for f in finished):
            assert request.status is RequestStatus.FINISHED
            del self._requests[request.request_id]
        self.finished += finished
        check_cache(self.cache, list(self._requests.values()))
        return plan

    def run(self, max_steps: int = 10_000) -> list[FinishedRequest]:
        """Step until nothing is left."""
        while self.scheduler.has_work:
            assert self.num_steps < max_steps, "no end in sight"
            self.step()
        # Nothing computes, so nothing may be waited for, and nothing is owned.
        assert not self.cache._in_flight
        assert self.cache.usage == 0
        assert self.num_offloads == self.num_restores
        return self.finished

    def _check_host_pages(self) -> None:
        """Every host page is free or some waiting request's."""
        offload = self.scheduler.offload
        held = [page for request in self._requests.values() for page in request.host_pages]
        assert sorted([*held, *offload._free]) == list(range(self.num_host_pages))
        assert all(request in self.scheduler.waiting for request in self._requests.values() if request.host_pages)
        self.runner.keep_on_host(set(held))

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.items, "requests are there and none runs"
        active = self.scheduler.active
        requests = [item.request for item in plan.items]
        assert len(set(requests)) == len(requests) <= len(active) <= self.limits.max_requests_per_batch
        assert set(requests) <= set(active)
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items)
        assert plan.num_tokens <= self.limits.max_batch_tokens or self.mode is not MODES[CHUNKED]
        pages = 0
        assert plan.num_logits == sum(max(1, item.num_results) for item in plan.items)
        assert plan.num_logits <= self.limits.max_requests_per_batch
        for item in plan.items:
            request, stop = item.request, item.num_computed_before + item.num_tokens
            assert request.scheduled_at == self._started.setdefault(request.request_id, self.num_steps - 1.0)
            assert 0 < item.num_tokens - len(item.drafts) <= request.num_uncomputed
            assert not item.drafts or item.num_results == len(item.drafts) + 1
            assert item.num_computed_before == request.num_computed_tokens
            for allocator, table in zip(self.cache.allocators, request.tables, strict=True):
                assert allocator.num_missing_blocks(table, stop) == 0, "no slots for the step's tokens"
                window = allocator.read_window(table, item.num_computed_before, stop)
                pages += len(window.blocks) * len(allocator.layers)
        assert plan.num_pages_read == pages <= self.limits.max_pages_read
        assert set(active) | set(self.scheduler.waiting) == set(self._requests.values())
        assert len(active) + len(self.scheduler.waiting) == len(self._requests)
