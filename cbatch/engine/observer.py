"""What somebody who watches the engine is told of every step; nobody does by default, and that costs nothing.

The job's trace writer and the simulator watch. A record is plain numbers, made after the step: nothing in it is shared
with the engine, so it may be kept and handed to other threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cbatch.engine.cache.manager import CacheLoad
from cbatch.engine.request import Request, RequestStatus
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.step import FinishedRequest, StepPlan


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Monotonic seconds at which the parts of a step began and ended."""

    began: float
    scheduled: float
    ran: float
    ended: float  # updated


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request that came into a state. A first PENDING is told together with the PREFILLING that ends it."""

    request_id: int
    sample: int
    state: RequestStatus
    at: float  # monotonic seconds
    num_prompt_tokens: int
    num_generated: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what it computed, how long that took, and what it left."""

    times: StepTimes
    num_requests: int  # in the batch
    prefill_tokens: int  # query tokens of prompts, and of what is computed again
    decode_tokens: int  # query tokens of requests that generate
    kv_tokens_read: float  # over requests, those of whole pages; averaged over layers
    num_pairs: int  # of a prefill's query tokens with the tokens that they attend to
    num_running: int  # after the step, like the next one
    num_waiting: int
    load: CacheLoad  # while it ran
    num_offloads: int
    num_restores: int
    num_soft_resets: int
    events: tuple[RequestEvent, ...]


class Observer(Protocol):
    """Somebody who watches an engine step by step."""

    def on_step(self, record: StepRecord) -> None:
        """Take note of a step; called on the engine's thread, so it had better be quick."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the observer was told last of a request."""

    state: RequestStatus
    preemptions: int


class StepRecorder:
    """Makes the records for one observer; keeps the states of the requests that are on their way."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._known: dict[Request, _Known] = {}

    def changes(self, present: Sequence[Request], began: float) -> list[RequestEvent]:
        """Find who joined or moved out when a step was scheduled, which `began` then, with these requests active."""
        events: list[RequestEvent] = []
        still_there = set(present)
        for request in [r for r in self._known if r not in still_there]:
            if self._known[request].state is not RequestStatus.PENDING:
                self._change(events, request, RequestStatus.PENDING, began)
        for request in present:
            known = self._known.get(request)
            if known is None:
                self._change(events, request, RequestStatus.PENDING, request.created_at)
            elif request.preemptions > known.preemptions and known.state is not RequestStatus.PENDING:
                self._change(events, request, RequestStatus.PENDING, began)  # out and in again within the step
            if self._known[request].state is RequestStatus.PENDING:
                self._change(events, request, RequestStatus.PREFILLING, began)
        return events

    def record(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        load: CacheLoad,
        finished: Sequence[FinishedRequest],
        times: StepTimes,
        changes: Iterable[RequestEvent],
    ) -> None:
        """Tell the observer of a step that is booked; `changes` are those that came with its schedule."""
        record = StepRecord(
            times=times,
            num_requests=len(plan.items),
            prefill_tokens=plan.num_tokens - plan.num_decode_tokens,
            decode_tokens=plan.num_decode_tokens,
            kv_tokens_read=scheduler.cache.tokens_in_pages(plan.num_pages_read),
            num_pairs=plan.num_pairs,
            num_running=len(scheduler.active),
            num_waiting=len(scheduler.waiting),
            load=load,
            num_offloads=plan.moves.num_offloads,
            num_restores=plan.moves.num_restores,
            num_soft_resets=plan.moves.num_soft_resets,
            events=(*changes, *self._results(plan, finished, times)),
        )
        self._observer.on_step(record)

    def forget(self) -> None:
        """Let go of requests that were given up."""
        self._known.clear()

    def _results(self, plan: StepPlan, finished: Sequence[FinishedRequest], times: StepTimes) -> list[RequestEvent]:
        """Find what the results of a step changed."""
        events: list[RequestEvent] = []
        for request in (item.request for item in plan.items):
            known = self._known.get(request)  # nobody, where an earlier step ended it
            if known and request.status is RequestStatus.DECODING and known.state is not RequestStatus.DECODING:
                self._change(events, request, RequestStatus.DECODING, times.ran)
        for request in (f.request for f in finished):
            self._change(events, request, RequestStatus.FINISHED, times.ended)
            del self._known[request]
        return events

    def _change(self, events: list[RequestEvent], request: Request, state: RequestStatus, at: float) -> None:
        self._known[request] = _Known(state, request.preemptions)
        events.append(
            RequestEvent(
                request.request_id,
                request.sample,
                state,
                at,
                request.num_prompt_tokens,
                request.num_generated,
                request.cached_tokens,
            )
        )
