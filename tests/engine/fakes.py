"""Requests, a model and a KV store that need no torch: what scheduling does is checked by what would be computed.

`FakeRunner` stands in for the model runner. It writes into every slot that a step computes a fingerprint of the
tokens up to there, and checks before sampling that every slot of a request's context holds the right one. A stale
shared block, a wrong table, a slot never written or freed too early all show at the step where they happen.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbatch.config import SamplingParams
from cbatch.engine.cache.allocator import CacheAllocator, ReadWindow, make_table
from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS, CachePool
from cbatch.engine.cache.sliding import SlidingAttentionCacheAllocator
from cbatch.engine.cache.store import BlockStore
from cbatch.engine.modes import CHUNKED, MODES, Mode
from cbatch.engine.offload import PageCopies
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
        tables=[make_table() for _ in range(num_types)],
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
class FakeItem:
    """An item of a plan, with what the host knew of its request when the step was launched."""

    item: ScheduledRequest
    known: list[int]  # tokens up to the last one that the step computes, but for one that was not known
    windows: list[ReadWindow]


@dataclass
class FakeStep:
    """A step that was launched. It is computed when it is collected, as late as can be."""

    runner: FakeRunner
    items: list[FakeItem]
    kept: set[int]  # pages whose content means something
    out: PageCopies
    back: PageCopies
    held: set[int] | None = None  # pages of the host that hold anything behind it, where somebody knows

    def collect(self) -> list[Results]:
        assert self.runner.in_flight.popleft() is self, "steps run in the order in which they were launched"
        results = self.runner.compute(self)
        if self.held is not None:
            self.runner.keep_on_host(self.held)
        return results


@dataclass
class FakeRunner:
    """Computes steps with the toy model over a KV store of fingerprints."""

    cache: CacheManager
    failing: dict[int, int] = field(default_factory=dict)  # request id → tokens that it generates before it fails
    num_computed: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_carried: int = 0  # tokens that were not known when the step that computes them was launched
    in_flight: deque[FakeStep] = field(default_factory=deque)
    _pages: dict[int, list[object]] = field(default_factory=dict)
    _host_pages: dict[int, list[object]] = field(default_factory=dict)
    _chosen: dict[Request, int] = field(default_factory=dict)  # by the last step that ran

    def run(self, plan: StepPlan) -> list[Results]:
        return self.launch(plan).collect()

    def launch(self, plan: StepPlan) -> FakeStep:
        """Take note of all that may be different by the time the step runs."""
        shared = self._shared_pages()
        assert not shared.intersection(plan.moves.back.cache_pages), "copies back what is in the cache"
        step = FakeStep(
            self,
            [self._look_at(item) for item in plan.items],
            self._pages_in_use(),
            PageCopies(list(plan.moves.out.cache_pages), list(plan.moves.out.host_pages)),
            PageCopies(list(plan.moves.back.cache_pages), list(plan.moves.back.host_pages)),
        )
        self.in_flight.append(step)
        return step

    def compute(self, step: FakeStep) -> list[Results]:
        for page, host_page in zip(step.out.cache_pages, step.out.host_pages, strict=True):
            assert host_page not in self._host_pages, "overwrites what has not come back"
            self._host_pages[host_page] = list(self._pages[page])
        # Lose the content of every block that is neither in a table nor findable.
        self._pages = {page: held for page, held in self._pages.items() if page in step.kept}
        for page, host_page in zip(step.back.cache_pages, step.back.host_pages, strict=True):
            self._pages[page] = list(self._host_pages[host_page])
        tokens = {seen.item.request: self._tokens(seen) for seen in step.items}
        for seen in step.items:
            self._write(seen, tokens[seen.item.request])
        for seen in step.items:
            self._check_context(seen, tokens[seen.item.request])
        self._chosen = {}
        return [self._sample(seen.item, tokens[seen.item.request]) for seen in step.items if seen.item.num_results]

    def _look_at(self, item: ScheduledRequest) -> FakeItem:
        request, start, stop = item.request, item.num_computed_before, item.num_computed_before + item.num_tokens
        known = step_tokens(item)
        assert len(known) in (stop, stop - 1), "at most one token is to come"
        windows = []
        for allocator, table in zip(self.cache.allocators, request.tables, strict=True):
            window = allocator.read_window(table, start, stop)
            assert len(window.blocks) == allocator.num_blocks_read(start, stop)
            windows.append(ReadWindow(list(window.blocks), window.start))
            if isinstance(allocator, FullAttentionCacheAllocator):
                for block in window.blocks[start // allocator.page_size :]:
                    assert allocator.ref_count(block) == 1, "writes into a block that another request reads"
                    assert not allocator.index.holds(block), "writes into a block that others may find"
        return FakeItem(item, known, windows)

    def _tokens(self, seen: FakeItem) -> list[int]:
        """All tokens up to the last one that a step computes; what was not known is what the step before chose."""
        if len(seen.known) == seen.item.num_computed_before + seen.item.num_tokens:
            return seen.known
        self.num_carried += 1
        return [*seen.known, self._chosen[seen.item.request]]

    def keep_on_host(self, host_pages: set[int]) -> None:
        """Lose every other page of the host's."""
        assert host_pages <= self._host_pages.keys()
        self._host_pages = {page: held for page, held in self._host_pages.items() if page in host_pages}

    def _sample(self, item: ScheduledRequest, tokens: list[int]) -> Results:
        request = item.request
        own = tokens[: len(tokens) - len(item.drafts)]
        results: Results = []
        for i in range(item.num_results):
            failed = self.failing.get(request.request_id) == len(own) - request.num_prompt_tokens + i
            failure = RowError("failed", "as the test wants it")
            results.append(failure if failed else toy_model([*own, *item.drafts[:i]]))
        taken = accept(item.drafts, results)
        self._chosen[request] = taken[-1] if isinstance(taken[-1], int) else VOCAB_SIZE
        self.num_drafted += len(item.drafts)
        self.num_accepted += len(taken) - 1
        return taken

    def _write(self, seen: FakeItem, tokens: list[int]) -> None:
        item = seen.item
        start, stop = item.num_computed_before, item.num_computed_before + item.num_tokens
        self.num_computed += item.num_tokens
        values = fingerprints(tokens)
        for allocator, window in zip(self.cache.allocators, seen.windows, strict=True):
            size = allocator.page_size
            for position in range(start, stop):
                block = window.blocks[(position - window.start) // size]
                for layer, page in zip(allocator.layers, self.pages_of(block, len(allocator.layers)), strict=True):
                    self._pages.setdefault(page, [None] * size)[position % size] = (layer, values[position])

    def _check_context(self, seen: FakeItem, tokens: list[int]) -> None:
        item = seen.item
        request, start, stop = item.request, item.num_computed_before, item.num_computed_before + item.num_tokens
        values = fingerprints(tokens)
        for allocator, window in zip(self.cache.allocators, seen.windows, strict=True):
            size = allocator.page_size
            first = 0
            if isinstance(allocator, SlidingAttentionCacheAllocator):
                first = max(0, start + 1 - allocator._window)
            assert window.start <= first
            for i, block in enumerate(window.blocks):
                begin = window.start + i * size
                seen_slots = slice(max(0, first - begin), min(size, stop - begin))
                expected = values[begin : begin + size][seen_slots]
                for layer, page in zip(allocator.layers, self.pages_of(block, len(allocator.layers)), strict=True):
                    held = self._pages.get(page, [])[seen_slots]
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

    def _pages_in_use(self) -> set[int]:
        """The pages of every block that is in a table or findable."""
        return {
            page
            for allocator in self.cache.allocators
            for block in _blocks_in_use(allocator)
            for page in self.pages_of(block, len(allocator.layers))
        }


def step_tokens(item: ScheduledRequest) -> list[int]:
    """All known tokens of a request up to the last one that a step computes, drafts included."""
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


def what_is_told_of(request: Request) -> tuple[object, ...]:
    """All that an output says of a request."""
    counts = (request.cached_tokens, request.computed_tokens, request.recomputed_tokens, request.preemptions)
    return (*request.token_ids, *request.token_times, *counts)


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
    most_in_flight: int = 0  # steps, while the next results are waited for
    drains: random.Random | None = None  # now and then, all that is in flight is waited for
    num_steps: int = 0
    num_dropped: int = 0  # tokens that were computed for requests that had ended
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
        self._in_flight: deque[tuple[StepPlan, FakeStep]] = deque()
        self._left_as: dict[Request, tuple[object, ...]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self._requests[request.request_id] = request
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        """Schedule, launch, update; the time is the number of the step, and half a step later when it has run."""
        if self.drains is not None and len(self._in_flight) > 0 and self.drains.random() < 0.3:
            self._finish()
            return StepPlan()
        plan = self.scheduler.schedule(float(self.num_steps))
        self.num_steps += 1
        self.num_soft_resets += plan.moves.num_soft_resets
        self.num_offloads += plan.moves.num_offloads
        self.num_restores += plan.moves.num_restores
        self._check_plan(plan)
        check_cache(self.cache, list(self._requests.values()))
        if plan.items:
            running = self.runner.launch(plan)
            running.held = self._pages_on_host()
            self._in_flight.append((plan, running))
            self.scheduler.launch(plan)
        if not plan.items or len(self._in_flight) > self.most_in_flight:
            self._finish()
        return plan

    def _finish(self) -> None:
        """Collect and book the oldest step."""
        plan, running = self._in_flight.popleft()
        sampled = running.collect()
        ended = [item for item in plan.items if item.request.status is RequestStatus.FINISHED]
        self.num_dropped += sum(item.num_tokens for item in ended)
        finished = self.scheduler.update(plan, sampled, self.num_steps - 0.5)
        for request in (f.request for f in finished):
            assert request.status is RequestStatus.FINISHED
            del self._requests[request.request_id]
            self._left_as[request] = what_is_told_of(request)
        self.finished += finished
        check_cache(self.cache, list(self._requests.values()))

    def run(self, max_steps: int = 10_000) -> list[FinishedRequest]:
        """Step until nothing is left."""
        while self.scheduler.has_work:
            assert self.num_steps < max_steps, "no end in sight"
            self.step()
        assert not self._in_flight
        assert all(what_is_told_of(request) == left for request, left in self._left_as.items()), "changed afterwards"
        # Nothing computes, so nothing may be waited for, and nothing is owned.
        assert not self.cache._in_flight
        assert self.cache.usage == 0
        assert self.num_offloads == self.num_restores
        return self.finished

    def _pages_on_host(self) -> set[int]:
        """Every host page is free or some waiting request's; give the latter."""
        offload = self.scheduler.offload
        held = [page for request in self._requests.values() for page in request.host_pages]
        assert sorted([*held, *offload._free]) == list(range(self.num_host_pages))
        assert all(request in self.scheduler.waiting for request in self._requests.values() if request.host_pages)
        return set(held)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.items or self._in_flight, "requests are there and none runs"
        assert plan.items or not (plan.moves.out or plan.moves.back), "nobody would copy them"
        active = self.scheduler.active
        requests = [item.request for item in plan.items]
        assert len(set(requests)) == len(requests) <= len(active)
        assert sum(not request.is_ending for request in active) <= self.limits.max_requests_per_batch
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
