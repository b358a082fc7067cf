"""Decides at every step which requests compute how many tokens, and what the sampled tokens mean for them.

The engine calls `add`, and once per step `schedule`, `launch` and `update`. Between the latter two a step is in flight,
and further ones may be scheduled: each of its requests that samples has a token to come, which counts wherever only
positions matter. The scheduler alone writes requests. A step touches the requests of its batch and a bounded number of
waiting ones, however many wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cbatch.engine.cache.manager import Admission, CacheManager
from cbatch.engine.drafting import add_drafts
from cbatch.engine.offload import OffloadManager
from cbatch.engine.prefix_groups import PrefixGroupQueue
from cbatch.engine.request import DECODING, FINISHED, PENDING, PREFILLING, Request
from cbatch.engine.speculation import Results
from cbatch.engine.step import FinishedRequest, ScheduledRequest, StepLimits, StepPlan
from cbatch.engine.stopping import Stop
from cbatch.errors import RowError


class Scheduler:
    """The mechanism that all policies share.

    A policy orders the candidates of a step; one that is there for comparison (`modes`) also says who may join and
    whether prompts are split.
    """

    default_safety_margin: float
    waiting_batches = 2  # requests kept waiting, in batches: enough to look ahead

    def __init__(
        self, cache: CacheManager, limits: StepLimits, *, safety_margin: float = 0.0, num_host_pages: int = 0
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.offload = OffloadManager(cache, num_host_pages)
        self._safety_margin = safety_margin  # share of the cache that is kept from new requests
        self.waiting: deque[Request] | PrefixGroupQueue = deque()
        self.active: list[Request] = []  # in the order in which they were admitted
        self.num_in_flight = 0  # steps

    def order_active(self) -> Iterable[Request]:
        """Give the active requests in the order in which they get the step's budget: who generates before prompts."""
        decodes, prefills = self._split_active()
        return [*decodes, *prefills]

    def expected_tokens(self, request: Request) -> int:
        """Count the tokens for which an admitted request is given room beforehand: those that it has."""
        return request.num_tokens

    def may_join(self, plan: StepPlan) -> bool:
        """Tell whether one more waiting request may join in the step of `plan`, limits and cache aside."""
        return True

    def has_token_budget(self, plan: StepPlan) -> bool:
        """Tell whether `plan` can take any more tokens."""
        return plan.num_tokens < self.limits.max_batch_tokens

    def num_tokens_within_budget(self, num_uncomputed: int, plan: StepPlan) -> int:
        """Count those of a request's uncomputed tokens that still fit a `plan`: all, a chunk, or none."""
        num_left = self.limits.max_batch_tokens - plan.num_tokens
        return num_uncomputed if num_uncomputed < num_left else num_left

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active or self.num_in_flight)

    def add(self, request: Request) -> None:
        """Queue a request that the cache can hold."""
        self.waiting.append(request)

    def drop_waiting(self) -> list[Request]:
        """Forget and return the requests that were never scheduled."""
        dropped = [r for r in self.waiting if r.scheduled_at is None]
        kept = [r for r in self.waiting if r.scheduled_at is not None]
        self.waiting.clear()
        self.waiting.extendleft(reversed(kept))
        return dropped

    def abandon(self) -> None:
        """Forget all requests, and the steps in flight, and free what they hold."""
        for request in self.active:
            self.cache.release(request)
        for request in self.waiting:
            self.offload.forget(request)
        self.active = []
        self.waiting.clear()
        self.num_in_flight = 0

    def schedule(self, now: float) -> StepPlan:
        """Choose the next step; `now` in monotonic seconds.

        Empty only if there is no work, or none before the results of a step in flight are there.
        """
        plan = StepPlan()
        if self.num_in_flight and self._most_wait():
            return plan
        starved = self._schedule_requests(self.order_active(), plan)
        # What starves needs the blocks more than what waits, and both more than drafts.
        if not starved and self.waiting:
            self._admit_waiting(plan)
        if not starved and plan.num_tokens < self.limits.max_tokens_with_drafts:
            add_drafts(plan, self.limits, self.cache, len(self.active))
        # Where a batch stands, only the starved move: those in it keep their cache.
        while starved and self._move_out_newest(set(starved if plan.items else self.active), plan):
            rest = starved if plan.items else self.order_active()
            starved = self._schedule_requests([r for r in rest if r.status is not PENDING], plan)
        if not plan.items and not starved:
            self._admit_waiting(plan)
        for item in plan.items:
            if item.request.scheduled_at is None:
                item.request.scheduled_at = now
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Book that a step runs: what it computes counts as computed from now on, and its tokens are to come."""
        self.num_in_flight += 1
        for request, num_tokens, num_before, _, num_results, drafts in plan.items:
            request.num_computed_tokens = num_before + num_tokens - len(drafts)
            request.num_in_flight += 1
            if num_results:
                request.num_pending += 1

    def num_filled(self) -> dict[Request, int]:
        """Count the tokens that each active request has in its blocks once what was launched has run, drafts aside."""
        return {request: request.num_computed_tokens for request in self.active}

    def halve(self, plan: StepPlan) -> StepPlan:
        """Halve the step's token limit, for good, and give what of a `plan` that was not launched is within it.

        The blocks of the rest are theirs already and serve a later step; the moves are those of `plan`.
        """
        self.limits = replace(self.limits, max_batch_tokens=max(1, self.limits.max_batch_tokens // 2))
        smaller = StepPlan(moves=plan.moves)
        for request in (item.request for item in plan.items):
            if share := self._share_within_limits(request, smaller):
                self._put(smaller, share)
        return smaller

    def update(self, plan: StepPlan, results: Sequence[Results], now: float) -> list[FinishedRequest]:
        """Book the results of the step that was launched first: tokens or a failure for each request that samples.

        They are in plan order. Of a request that an earlier step ended this one leaves nothing.
        """
        finished: list[FinishedRequest] = []
        self.num_in_flight -= 1
        left = iter(results)
        for request, num_tokens, num_before, _, num_results, drafts in plan.items:
            request.num_in_flight -= 1
            if not num_results:
                self._book_computed(request, num_before, num_before + num_tokens)
                request.status = PREFILLING
                continue
            of_item = next(left)
            request.num_pending -= 1
            if request.status is FINISHED:
                continue
            outcome, num_taken = self._take(request, of_item, now)
            reached = num_before + num_tokens
            if drafts:
                # Each token but the last was one, and has its KV: what is behind them is overwritten by what comes.
                request.num_computed_tokens += num_taken - 1
                reached += num_taken - 1 - len(drafts)
            self._book_computed(request, num_before, reached)
            if outcome is None:
                request.status = DECODING
            else:
                self.cache.release(request, keep_content=not isinstance(outcome, RowError))
                request.status = FINISHED
                finished.append(FinishedRequest(request, outcome))
        if finished:
            self.active = [r for r in self.active if r.status is not FINISHED]
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
        # Who ends with the results of a step in flight has a place in no other one.
        num_ending = sum(request.is_ending for request in self.active) if self.num_in_flight else 0
        most_active = self.limits.max_requests_per_batch + num_ending
        if len(self.active) >= most_active:
            return
        reserved = self._blocks_promised()
        deferred: list[Request] = []
        while self.waiting and self._has_budget(plan) and len(deferred) < self.limits.max_requests_per_batch:
            if len(self.active) >= most_active or not self.may_join(plan):
                break
            if self.active and 1.0 - self.cache.usage < self._safety_margin:
                break
            request = self.waiting[0]
            # Alone it may run, whatever is expected of it: it is known to fit.
            num_tokens = self.expected_tokens(request) if self.active else request.num_tokens
            admission = self.cache.admit(request, reserved, num_tokens)
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
            missing = self.cache.num_missing_blocks(request, self.expected_tokens(request))
            reserved = [r + m for r, m in zip(reserved, missing, strict=True)]
        self.waiting.extendleft(reversed(deferred))

    def _split_active(self) -> tuple[list[Request], list[Request]]:
        """Tell the active requests that lack one token's KV from those that lack more; who must wait is neither."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        may_wait = self.num_in_flight > 0
        for request in self.active:
            if may_wait and request.awaits_results:
                continue
            num_uncomputed = len(request.token_ids) + request.num_pending - request.num_computed_tokens
            (decodes if num_uncomputed == 1 else prefills).append(request)
        return decodes, prefills

    def _most_wait(self) -> bool:
        """Tell whether most active requests need results first: a step of the others takes as long as one of all."""
        going_on = [request for request in self.active if not request.is_ending]
        return 2 * sum(request.awaits_results for request in going_on) >= len(going_on) > 0

    def _blocks_promised(self) -> list[int]:
        """Count per allocator the blocks that active requests still need for the tokens expected of them."""
        promised = [0] * len(self.cache.allocators)
        for request in self.active:
            num_tokens = self.expected_tokens(request)
            if num_tokens > request.num_slots:
                missing = self.cache.num_missing_blocks(request, num_tokens)
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
        num_uncomputed = len(request.token_ids) + request.num_pending - before
        num_tokens = self.num_tokens_within_budget(num_uncomputed, plan)
        if num_tokens == 0 or plan.num_logits >= limits.max_requests_per_batch:
            return None
        if request.logprobs is not None and request.scores_prompt:
            num_tokens = min(num_tokens, limits.max_requests_per_batch - plan.num_logits)
        num_pages = self.cache.num_pages_read(request, before + num_tokens)
        if plan.num_pages_read + num_pages > limits.max_pages_read:
            return None
        num_results = 1 if num_tokens == num_uncomputed else 0
        return ScheduledRequest(request, num_tokens, before, num_pages, num_results)

    def _put(self, plan: StepPlan, share: ScheduledRequest) -> None:
        request, num_tokens, _, num_pages, _, _ = share
        plan.items.append(share)
        plan.num_tokens += num_tokens
        if request.status is DECODING or request.num_pending:
            plan.num_decode_tokens += num_tokens
        plan.num_logits += num_tokens if request.logprobs is not None and request.scores_prompt else 1
        plan.num_pages_read += num_pages

    def _move_out_newest(self, candidates: set[Request], plan: StepPlan) -> bool:
        """Send the one of `candidates` that was admitted last back to the head of the queue.

        Tell whether that could be done: not while a step in flight computes it, or may yet make room.
        """
        newest = next(r for r in reversed(self.active) if r in candidates)
        if newest.num_in_flight or (self.num_in_flight and not plan.items):
            return False
        # The cache holds any request alone. Only where attention types share it can the last one starve, its blocks
        # scattered over chunks that others left: then it moves too, and packs them anew.
        assert len(self.active) > 1 or len(self.cache.allocators) > 1, "the last active request starves"
        self.active.remove(newest)
        self.offload.move_out(newest, plan.moves)
        self.waiting.appendleft(newest)
        return True

    # Booking

    def _book_admitted(self, request: Request) -> None:
        self.active.append(request)
        request.status = PREFILLING
        # After a soft reset the cache can hold more of a prompt than the request had come to compute itself.
        request.cached_tokens += max(0, request.num_computed_tokens - request.num_ever_computed)
        request.num_ever_computed = max(request.num_ever_computed, request.num_computed_tokens)

    def _book_computed(self, request: Request, num_before: int, reached: int) -> None:
        """Count the tokens of a step as computed; the drafts among them are the request's own tokens by now."""
        known = request.num_ever_computed
        if reached > known:
            request.computed_tokens += reached - known
            request.num_ever_computed = reached
        if known > num_before:
            request.recomputed_tokens += min(known, reached) - num_before
        self.cache.commit(request, num_before, reached)

    def _take(self, request: Request, results: Results, now: float) -> tuple[Stop | RowError | None, int]:
        """Give a request its tokens; return what ends it, if anything does, and how many of the results it took."""
        num_taken = 0
        for result in results:
            num_taken += 1
            outcome = result if isinstance(result, RowError) else self._append_token(request, result, now)
            if outcome is not None:
                return outcome, num_taken
        return None, num_taken

    def _append_token(self, request: Request, token_id: int, now: float) -> Stop | None:
        if request.max_tokens == 0:  # its prompt was to be scored, and no more
            return Stop("length")
        request.token_ids.append(token_id)
        request.token_times.append(now)
        num_generated = len(request.token_ids) - len(request.prompt.token_ids)
        return request.stopping.check(token_id, num_generated, request.max_tokens)
