"""Stub engines over no model, on a clock of their own: what a step takes follows from the settings, by a formula.

The best settings are `BEST`. In a process of the command line the environment says more (`LoadedEngines`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.stats import EngineStats
from cbatch.errors import DoesNotFitError
from cbatch.tune.space import Value
from tests.stub_engine import StubEngine, StubPlan, StubTokenizer

BEST = {"page_size": 64, "max_batch_tokens": 512}
STEEPNESS = 0.2  # of the cost of a step, per doubling of a setting away from the best
STEP_S = 0.01
BUILD_S = 0.5

Hook = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class TunePlan:
    """A plan without a model."""

    page_size: int = 16
    num_blocks: int = 4096
    max_model_len: int = 4096
    max_batch_tokens: int = 128
    max_requests_per_batch: int = 8
    scheduler_type: str = "fifo"
    allow_block_sharing: bool = True

    def settings(self) -> dict[str, dict[str, object]]:
        return {"device": {"value": "cpu", "reason": "stub"}, "dtype": {"value": "float32", "reason": "stub"}}


@dataclass(slots=True)
class ClockedEngine:
    """A stub engine whose steps take the time of the settings' formula."""

    source: StubEngines
    plan: TunePlan
    inner: StubEngine
    first_step_s: float
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def stats(self) -> EngineStats:
        return self.inner.stats

    def prepare(self, params: SamplingParams) -> None:
        self.inner.prepare(params)

    def steps(self, prompts: Iterator[Prompt | None]) -> Iterator[list[RequestOutput]]:
        def noted() -> Iterator[Prompt | None]:
            for prompt in prompts:
                if prompt is not None:
                    self.prompts.append(prompt)
                yield prompt

        for outputs in self.inner.steps(noted()):
            self.source.now += STEP_S * step_cost(self.plan) + self.first_step_s
            self.first_step_s = 0.0
            time.sleep(self.source.sleep_s)
            yield outputs


def step_cost(plan: TunePlan) -> float:
    """1 at the best settings."""
    doublings = sum(abs(math.log2(getattr(plan, name) / best)) for name, best in BEST.items())
    return math.exp(STEEPNESS * doublings)


@dataclass(slots=True)
class StubEngines:
    """What a search needs of a model in memory."""

    config: EngineConfig
    default: TunePlan = field(default_factory=TunePlan)
    tokenizer: StubTokenizer = field(default_factory=StubTokenizer)
    generation_defaults: dict[str, object] = field(default_factory=dict)
    first_step_s: float = 0.0  # what an engine's first step takes beyond the others
    sleep_s: float = 0.0  # what a step really takes
    on_build: Hook = lambda _settings: None
    now: float = 0.0
    engines: list[ClockedEngine] = field(default_factory=list)
    engine_options: dict[str, Any] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def plan(self, settings: Mapping[str, Value]) -> TunePlan:
        given = {
            name: value
            for name in ("page_size", "max_batch_tokens", "max_requests_per_batch", "scheduler_type")
            if (value := getattr(self.config, name)) is not None
        }
        values: dict[str, object] = {**given, **settings}
        planned = replace(self.default, **values)  # type: ignore[arg-type]
        cache_tokens = self.default.num_blocks * self.default.page_size
        if planned.max_batch_tokens > 8192:
            raise DoesNotFitError("no memory is left for the KV cache")
        requests = min(planned.max_requests_per_batch, planned.max_batch_tokens)
        return replace(planned, max_requests_per_batch=requests, num_blocks=cache_tokens // planned.page_size)

    def build(self, settings: Mapping[str, Value]) -> ClockedEngine:
        self.on_build(settings)
        self.now += BUILD_S
        plan = self.plan(settings)
        stub_plan = StubPlan(plan.max_model_len, plan.max_requests_per_batch)
        inner = StubEngine(self.config, plan=stub_plan, tokenizer=self.tokenizer, **self.engine_options)
        self.engines.append(ClockedEngine(self, plan, inner, self.first_step_s))
        return self.engines[-1]

    def release(self) -> None:
        pass

    def used_bytes(self) -> int:
        return 1 << 30

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)


class LoadedEngines(StubEngines):
    """Stands in for the real ones in a process of the command line; the environment sets how it behaves."""

    def __init__(self, config: EngineConfig) -> None:
        time.sleep(float(os.environ.get("STUB_LOAD_S", "0")))
        failing = os.environ.get("STUB_OUT_OF_MEMORY_PAGE")

        def fail(settings: Mapping[str, object]) -> None:
            if failing is not None and settings.get("page_size") == int(failing):
                raise MemoryError

        super().__init__(config, sleep_s=float(os.environ.get("STUB_TUNE_STEP_S", "0")), on_build=fail)
