"""A device that is late: a step is computed when its results are collected, by when the next one's inputs are made.

What the host reads too early, or changes too early, shows as wrong tokens. `run_ahead` makes an engine over a tiny
model batch asynchronously, which on a CPU it does for tests only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

from cbatch.engine.engine import Engine
from cbatch.engine.runner import ModelRunner, PreparedStep
from cbatch.engine.speculation import Results
from cbatch.engine.step import RunningStep, StepPlan


@dataclass(eq=False)
class LateStep:
    """A step that waits in the device's queue."""

    device: LateDevice
    plan: StepPlan
    prepared: PreparedStep

    def collect(self) -> list[Results]:
        assert self.device.queue.popleft() is self, "steps run in the order in which they were launched"
        return self.device.runner._compute(self.plan, self.prepared).collect()


@dataclass
class LateDevice:
    """The queue of one runner."""

    runner: ModelRunner
    queue: deque[LateStep] = field(default_factory=deque)
    num_carried: int = 0  # tokens that were not known when a step was launched
    longest: int = 0  # the most steps that were in the queue

    def launch(self, plan: StepPlan) -> RunningStep:
        prepared = self.runner._prepare(plan)
        self._check_inputs(plan, prepared)
        self.runner._advance(plan, prepared)
        self.queue.append(LateStep(self, plan, prepared))
        self.longest = max(self.longest, len(self.queue))
        return self.queue[-1]

    def settle(self) -> None:
        while self.queue:
            self.queue[0].collect()

    def _check_inputs(self, plan: StepPlan, prepared: PreparedStep) -> None:
        """Every token was told to the host before, or is marked as one to come."""
        carried = prepared.staged.inputs.carried
        places = [] if carried is None else carried.places.tolist()
        input_ids = prepared.staged.inputs.input_ids[0].tolist()
        assert all(input_ids[place] == 0 for place in places)
        missing = [i for i in plan.items if i.num_computed_before + i.num_tokens > len(i.request.token_ids)]
        assert len(places) == len(missing)
        assert all(item.request.num_pending == 1 for item in missing)
        self.num_carried += len(places)


def run_ahead(engine: Engine) -> LateDevice:
    """Let `engine` launch each step before the results of the one before it are there, on a device that is late."""
    device = LateDevice(cast("ModelRunner", engine._runner))
    engine._runner.launch = device.launch  # type: ignore[method-assign]
    engine._runner.settle = device.settle  # type: ignore[method-assign]
    engine._most_in_flight = 1
    return device
