"""Decides at every step which requests compute how many tokens, and what the sampled tokens mean for them.

The engine calls `add`, and once per step `schedule` and `update`. The scheduler alone writes requests. A step touches
the requests of its batch and a bounded number of waiting ones, however many wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cbatch.engine.cache.manager import Admission, CacheManager
from cbatch.engine.offload import Moves, OffloadManager
from cbatch.engine.request import Request, RequestStatus
from cbatch.engine.stopping import Stop
from cbatch.errors import RowError


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one forward pass may hold."""

    max_batch_tokens: int  # query tokens
    max_requests_per_batch: int
    max_pages_read: int  # KV pages over all requests and layers, those of shared blocks once for each reader


class ScheduledRequest(NamedTuple):  # made for every request of every step, which dataclasses are slow at
    """A request's share of a step: its next `num_tokens` uncomputed tokens."""

    request: Request
    num_tokens: int
    num_computed_before: int
    num_pages_read: int = 0

    @property
    def samples(self) -> bool:
        """Tell whether the step computes the request's last token, whose logits give the next one."""
        return self.num_computed_before + self.num_tokens == self.request.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One forward pass: written by `schedule`, read by the batch builder and by `update`."""

    items: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    num_decode_tokens: int = 0  # of these, the ones of requests that generate
    num_logits: int = 0  # rows of logits; one for each request, sampling or not, but for prompts that are scored
    num_pages_read: int = 0
    moves: Moves = field(default_factory=Moves)  # carried out before the forward pass


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that left in `update`, and why."""

    request: Request
    outcome: Stop | RowError


class Scheduler(ABC):
    """The mechanism that all policies share.

    A policy orders the candidates of a step; one that is there for comparison (`modes`) also says who may join and
    whether prompts are split.
    """

    default_safety_margin: float

    def __init__(
        self, cache: CacheManager, limits: StepLimits, *, safety_margin: float = 0.0, num_host_pages: int = 0
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.offload = OffloadManager(cache, num_host_pages)
        self._safety_margin = safety_margin  # share of the cache that is kept from new requests
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []  # in the order in which they were admitted

    @abstractmethod
    def order_active(self) -> Iterable[Request]:
        """Give the active requests in the order in which they get the step's budget."""

    def may_join(self, plan: StepPlan) -> bool:
        """Tell whether one more waiting request may join in the step of `plan`, limits and cache aside."""
        return True

    def has_token_budget(self, plan: StepPlan) -> bool:
        """Tell whether `plan` can take any more tokens."""
        return plan.num_tokens < self.limits.max_batch_tokens

    def num_tokens_within_budget(self, request: Request, plan: StepPlan) -> int:
        """Count the uncomputed tokens of `request` that still fit a `plan`: all, a chunk, or none."""
        return min(len(request.token_ids) - request.num_computed_tokens, self.limits.max_batch_tokens - plan.num_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, request: Request) -> None:
        """Queue a request that the cache can hold."""
        self.waiting.append(request)

    def drop_waiting(self) -> list[Request]:
        """Forget and return the requests that were never scheduled."""
        dropped = [r for r in self.waiting if r.scheduled_at is None]
        self.waiting = deque(r for r in self.waiting if r.scheduled_at is not None)
        return dropped

    def abandon(self) -> None:
        """Forget all requests and free what they hold."""
        for request in self.active:
            self.cache.release(request)
        for request in self.waiting:
            self.offload.forget(request)
        self.active = []
        self.waiting.clear()

    def schedule(self, now: float) -> StepPlan:
        """Choose the next step; `now` in monotonic seconds. Empty only if there is no work."""
        plan = StepPlan()
        starved = self._schedule_requests(self.order_active(), plan)
        # What starves needs the blocks more than what waits.
        if not starved and self.waiting:
            self._admit_waiting(plan)
        while starved:
            # Where a batch stands, only the starved move: those in it keep their cache.
            self._move_out_newest(set(starved if plan.items else self.active), plan)
            rest = starved if plan.items else self.order_active()
            starved = self._schedule_requests([r for r in rest if r.status is not RequestStatus.PENDING], plan)
        if not plan.items:
            self._admit_waiting(plan)
        for item in plan.items:
            if item.request.scheduled_at is None:
                item.request.scheduled_at = now
        return plan

    def halve(self, plan: StepPlan) -> StepPlan:
        """Halve the step's token limit, for good, and give what of a `plan` that did not run is within it.

        The blocks of the rest are theirs already and serve a later step; the moves are those of `plan`.
        """
        self.limits = replace(self.limits, max_batch_tokens=max(1, self.limits.max_batch_tokens // 2))
        smaller = StepPlan(moves=plan.moves)
        for request in (item.request for item in plan.items):
            if share := self._share_within_limits(request, smaller):
                self._put(smaller, share)
        return smaller

    def update(self, plan: StepPlan, sampled: Sequence[int | RowError], now: float) -> list[FinishedRequest]:
        """Book the step's results; `sampled` holds one token or failure per request that samples, in plan order."""
        finished: list[FinishedRequest] = []
        results = iter(sampled)
        for item in plan.items:
            request = item.request
            samples = item.samples
            self._book_computed(item)
            if not samples:
                request.status = RequestStatus.PREFILLING
                continue
            result = next(results)
            outcome = result if isinstance(result, RowError) else self._append_token(request, result, now)
            if outcome is None:
                request.status = RequestStatus.DECODING
            else:
                self.cache.release(request, keep_content=not isinstance(outcome, RowError))
                request.status = RequestStatus.FINISHED
                finished.append(FinishedRequest(request, outcome))
        if finished:
            self.active = [r for r in self.active if r.status is not RequestStatus.FINISHED]
        return finished

    # Scheduling

    def _schedule_requests(self, requests: Iterable[Request], plan: StepPlan) -> list[Request]:
        """Give active requests their tokens; return those that found no block."""
        starved: list[Request] = []
        for request in requests:
            share = self._share_within_limits(request, plan)
            if share is None:
                continue
            if self.cache.extend(request, share.num_computed_before + share.num_tokens):
                self._put(plan, share)
            else:
                starved.append(request)
        return starved

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Let waiting requests join in order, past those whose prefix another one is computing right now."""
        reserved = self._blocks_promised()
        deferred: list[Request] = []
        while self.waiting and self._has_budget(plan) and len(deferred) < self.limits.max_requests_per_batch:
            if len(self.active) >= self.limits.max_requests_per_batch or not self.may_join(plan):
                break
            if self.active and 1.0 - self.cache.usage < self._safety_margin:
                break
            request = self.waiting[0]
            admission = self.cache.admit(request, reserved)
            if admission is Admission.NO_ROOM:
                break
            self.waiting.popleft()
            if admission is Admission.AWAITS_PREFIX:
                deferred.append(request)
                continue
            if request.host_pages:
                self.offload.move_back(request, plan.moves)
            self._book_admitted(request)
            share = self._share_within_limits(request, plan)
            if share is not None:
                extended = self.cache.extend(request, share.num_computed_before + share.num_tokens)
                assert extended, "admitted without room"
                self._put(plan, share)
            missing = self.cache.num_missing_blocks(request, request.num_tokens)
            reserved = [r + m for r, m in zip(reserved, missing, strict=True)]
        self.waiting.extendleft(reversed(deferred))

    def _split_active(self) -> tuple[list[Request], list[Request]]:
        """Tell the active requests that lack one token's KV from those that lack more."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.active:
            (decodes if len(request.token_ids) - request.num_computed_tokens == 1 else prefills).append(request)
        return decodes, prefills

    def _blocks_promised(self) -> list[int]:
        """Count per allocator the blocks that active requests still need for the tokens that they have."""
        promised = [0] * len(self.cache.allocators)
        for request in self.active:
            if len(request.token_ids) > request.num_slots:
                missing = self.cache.num_missing_blocks(request, request.num_tokens)
                promised = [p + m for p, m in zip(promised, missing, strict=True)]
        return promised

    def _has_budget(self, plan: StepPlan) -> bool:
        return (
            self.has_token_budget(plan)
            and plan.num_logits < self.limits.max_requests_per_batch
            and plan.num_pages_read < self.limits.max_pages_read
        )

    def _share_within_limits(self, request: Request, plan: StepPlan) -> ScheduledRequest | None:
        """Give what of `request` the step can still take: all of its uncomputed tokens, a chunk of them, or nothing."""
        limits, before = self.limits, request.num_computed_tokens
        num_tokens = self.num_tokens_within_budget(request, plan)
        if num_tokens == 0 or plan.num_logits >= limits.max_requests_per_batch:
            return None
        if request.logprobs is not None and request.scores_prompt:
            num_tokens = min(num_tokens, limits.max_requests_per_batch - plan.num_logits)
        num_pages = self.cache.num_pages_read(request, before + num_tokens)
        if plan.num_pages_read + num_pages > limits.max_pages_read:
            return None
        return ScheduledRequest(request, num_tokens, before, num_pages)

    def _put(self, plan: StepPlan, share: ScheduledRequest) -> None:
        request, num_tokens, _, num_pages = share
        plan.items.append(share)
        plan.num_tokens += num_tokens
        if request.status is RequestStatus.DECODING:
            plan.num_decode_tokens += num_tokens
        plan.num_logits += num_tokens if request.logprobs is not None and request.scores_prompt else 1
        plan.num_pages_read += num_pages

    def _move_out_newest(self, candidates: set[Request], plan: StepPlan) -> None:
        """Send the one of `candidates` that was admitted last back to the head of the queue."""
        newest = next(r for r in reversed(self.active) if r in candidates)
        # The cache holds any request alone. Only where attention types share it can the last one starve, its blocks
        # scattered over chunks that others left: then it moves too, and packs them anew.
        assert len(self.active) > 1 or len(self.cache.allocators) > 1, "the last active request starves"
        self.active.remove(newest)
        self.offload.move_out(newest, plan.moves)
        self.waiting.appendleft(newest)

    # Booking

    def _book_admitted(self, request: Request) -> None:
        self.active.append(request)
        request.status = RequestStatus.PREFILLING
        # After a soft reset the cache can hold more of a prompt than the request had come to compute itself.
        request.cached_tokens += max(0, request.num_computed_tokens - request.num_ever_computed)
        request.num_ever_computed = max(request.num_ever_computed, request.num_computed_tokens)

    def _book_computed(self, item: ScheduledRequest) -> None:
        request, num_tokens, before, _ = item
        request.num_computed_tokens = before + num_tokens
        new = max(0, before + num_tokens - request.num_ever_computed)
        request.computed_tokens += new
        request.recomputed_tokens += num_tokens - new
        request.num_ever_computed += new
        self.cache.commit(request, before)

    def _append_token(self, request: Request, token_id: int, now: float) -> Stop | None:
        if request.max_tokens == 0:  # its prompt was to be scored, and no more
            return Stop("length")
        request.token_ids.append(token_id)
        request.token_times.append(now)
        return request.stopping.check(token_id, request.num_generated, request.max_tokens)


class FifoScheduler(Scheduler):
    """Active decodes, then active prefills, then waiting requests in arrival order."""

    default_safety_margin = 0.15

    def order_active(self) -> Iterable[Request]:
        decodes, prefills = self._split_active()
        return [*decodes, *prefills]


class PrefillFirstScheduler(Scheduler):
    """Prompts that were split are completed before decoding resumes; then waiting requests in arrival order."""

    default_safety_margin = 0.0

    def order_active(self) -> Iterable[Request]:
        decodes, prefills = self._split_active()
        return [*prefills, *decodes]


SCHEDULERS: dict[str, type[Scheduler]] = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}
