"""Traces of runs whose steps take what a planted cost says: the real engine over no model, on a clock of the test's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import SamplingParams
from cbatch.engine import engine as engine_module
from cbatch.engine import intake as intake_module
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt
from cbatch.engine.step import ComputedStep, StepPlan
from cbatch.jobs.trace import TraceWriter, describe_session
from cbatch.simulate.cost import CostModel
from cbatch.simulate.tracefile import TracedSession, read_trace
from tests.engine.unloaded import TOKEN, make_unloaded

PLANTED = CostModel(
    per_step_s=4e-3, per_query_token_s=3e-5, per_kv_token_s=2e-7, per_request_s=1e-4, per_pair_s=1e-8, hidden_tokens=0
)


class Clock:
    """Stands in for the module `time` in the engine: time passes when something takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


class Costly:
    """A runner whose steps take what a cost model says, give or take a tenth."""

    def __init__(self, clock: Clock, cost: CostModel, noise: float = 0.1) -> None:
        self.engine: Engine | None = None
        self._clock, self._cost, self._noise, self._rng = clock, cost, noise, random.Random(0)

    def launch(self, plan: StepPlan) -> ComputedStep:
        assert self.engine is not None
        pairs = sum(
            i.num_tokens * i.num_computed_before + i.num_tokens * (i.num_tokens + 1) // 2
            for i in plan.items
            if i.num_tokens > 1
        )
        kv_tokens = self.engine._cache.tokens_in_pages(plan.num_pages_read)
        duration = self._cost.step_s(plan.num_tokens, kv_tokens, len(plan.items), pairs)
        self._clock.sleep(duration * self._rng.uniform(1 - self._noise, 1 + self._noise))
        return ComputedStep([[TOKEN] for item in plan.items if item.num_results])

    def settle(self) -> None:
        pass


def stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let the engine read a clock that only the runner moves."""
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(intake_module, "time", clock)
    return clock


def traced_run(
    path: Path,
    clock: Clock,
    works: Iterable[tuple[int, int, int]],
    cost: CostModel = PLANTED,
    *,
    noise: float = 0.1,
    **settings: Any,
) -> list[TracedSession]:
    """Run requests of (prompt, shared, output) tokens on the engine with the planted cost, and read the trace."""
    runner = Costly(clock, cost, noise)
    engine = runner.engine = make_unloaded(runner, **settings)
    writer = TraceWriter(path, {"session": 1, **describe_session(engine)})
    engine.observe(writer)

    def prompts() -> Iterator[Prompt]:
        for number, (prompt, shared, output) in enumerate(works):
            yield Prompt(
                number,
                [1] * shared + [-1 - number] * (prompt - shared),
                SamplingParams(max_tokens=output, ignore_eos=True),
            )

    list(engine.generate(prompts()))
    writer.close()
    return read_trace(path)


def draw(seed: int, count: int, *, prompts: tuple[int, int], outputs: tuple[int, int], shared: int = 0) -> Any:
    rng = random.Random(seed)
    return [(rng.randrange(*prompts) + shared, shared, rng.randrange(*outputs)) for _ in range(count)]
