"""The engine's loop with a virtual clock: the real scheduler and the real cache, and a cost in a model's place.

A test holds it to the engine step by step. What it leaves out of a request: text, sampling, and everything that may
end a completion but its length.
"""

from __future__ import annotations

import math
from collections import Counter

from cbatch.config import SamplingParams
from cbatch.engine.modes import CHUNKED, MODES
from cbatch.engine.observer import Observer, StepRecorder, StepTimes
from cbatch.engine.request import Prompt, Request
from cbatch.engine.step import StepPlan
from cbatch.engine.stopping import StopCondition
from cbatch.simulate.cost import CostModel
from cbatch.simulate.figures import Figures, Tally
from cbatch.simulate.repeats import Repeater
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.workload import Work, Workload

SAMPLED = 0  # the token that every step gives
SHARED = 1  # the token that shared prefixes are made of; those of a request's own are below 0
_LENGTH_ONLY = StopCondition(frozenset(), strings=None)
_SAMPLING = SamplingParams(ignore_eos=True)


class Simulator:
    """One simulated run."""

    def __init__(
        self, engine: SimulatedEngine, cost: CostModel, *, mode: str = CHUNKED, observer: Observer | None = None
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._cache, self._scheduler = engine.build(MODES[mode])
        self._window = self._scheduler.waiting_batches * engine.max_requests_per_batch
        self._recorder = StepRecorder(observer) if observer is not None else None
        self._repeater = Repeater(
            self._scheduler, self._cache, cost, shares=engine.allow_block_sharing, read_size=engine.read_size
        )
        self._windows = Counter(engine.layer_windows)
        self._tally = Tally()
        self._now = 0.0
        self._num_given = 0

    @property
    def most_tokens(self) -> int:
        """Count the tokens of the longest request that can run, completion included; the last one has no KV."""
        return min(self._engine.max_model_len, self._cache.max_tokens_ever + 1)

    def run(
        self, workload: Workload, *, goodput_ttft: float | None = None, goodput_itl: float | None = None
    ) -> Figures:
        """Run every request to its end; the targets, in seconds, are those of goodput."""
        works = iter(workload)
        head = next(works, None)
        scheduler = self._scheduler
        while True:
            while head is not None and len(scheduler.waiting) < self._window and head.arrival_s <= self._now:
                self._give(head)
                head = next(works, None)
            if scheduler.has_work:
                can_come = head is not None and len(scheduler.waiting) < self._window
                self._step(next_arrival=head.arrival_s if head is not None and can_come else math.inf)
            elif head is not None:
                self._now = max(self._now, head.arrival_s)
            else:
                return self._tally.figures(goodput_ttft, goodput_itl)

    def _give(self, work: Work) -> None:
        """Queue a request, unless it can never fit."""
        if work.num_tokens > self.most_tokens:
            self._tally.refused += 1
            return
        number = self._num_given
        self._num_given += 1
        token_ids = [SHARED] * work.shared_tokens + [-1 - number] * (work.prompt_tokens - work.shared_tokens)
        self._scheduler.add(
            Request(
                prompt=Prompt(number, token_ids, _SAMPLING),
                max_tokens=work.output_tokens,
                created_at=work.arrival_s if work.arrival_s > 0 else self._now,
                stopping=_LENGTH_ONLY,
                token_ids=token_ids.copy(),
                tables=self._cache.make_tables(),
            )
        )

    def _step(self, next_arrival: float) -> None:
        """Take a step, and those like it that follow before anybody can join."""
        began = self._now
        plan = self._scheduler.schedule(began)
        assert plan.items, "a step of nothing, after which the next would be the same"
        kv_tokens = self._kv_tokens(plan)
        duration = self._duration(plan, kv_tokens)
        ended = self._now = began + duration
        self._scheduler.launch(plan)
        load = self._cache.load(self._scheduler.num_filled()) if self._recorder is not None else None
        changes = self._recorder.changes(self._scheduler.active, began) if self._recorder is not None else []
        self._tally.count_step(began, duration, len(plan.items), self._cache.usage)
        finished = self._scheduler.update(plan, [[SAMPLED]] * len(plan.items), ended)
        if finished:
            self._tally.count_finished(finished)
        if self._recorder is not None and load is not None:
            times = StepTimes(began, began, ended, ended)
            self._recorder.record(self._scheduler, plan, load, finished, times, changes)
            return
        for step in self._repeater.repeat(plan, kv_tokens, ended, next_arrival, SAMPLED):
            self._tally.count_step(step.began, step.duration, len(plan.items), step.usage)
            self._now = step.began + step.duration

    def _kv_tokens(self, plan: StepPlan) -> float:
        """Count the tokens of context that a step reads, over requests, averaged over layers."""
        if self._engine.has_pages:
            return self._cache.tokens_in_pages(plan.num_pages_read)
        shares = [(i.num_computed_before + i.num_tokens, i.num_tokens) for i in plan.items]
        read = sum(
            sum(reached if window is None else min(reached, window + new - 1) for reached, new in shares) * num_layers
            for window, num_layers in self._windows.items()
        )
        return read / self._windows.total()

    def _duration(self, plan: StepPlan, kv_tokens: float) -> float:
        num_pairs = 0
        if self._cost.per_pair_s and plan.num_tokens > len(plan.items):
            num_pairs = plan.num_pairs
        return self._cost.step_s(plan.num_tokens, kv_tokens, len(plan.items), num_pairs)
