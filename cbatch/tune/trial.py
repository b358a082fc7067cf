"""What a trial is: a configuration, the sample that it ran over, and what came of it. Used by everything in tune."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from cbatch.tune.space import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run over a sample came to; a failure is an outcome like any other."""

    status: Literal["ok", "failed"]
    reason: str | None = None  # of a failure
    timed_s: float = 0.0  # first step's start → last step's end, warm-up left out
    prompt_tokens: int = 0
    output_tokens: int = 0
    memory_bytes: int = 0  # the most that was in use
    wall_s: float = 0.0  # building the engine and warming it up included

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of generation."""
        return self.output_tokens / self.timed_s if self.timed_s > 0 else 0.0

    @property
    def processed_per_s(self) -> float:
        """Tokens of prompts and outputs per second: what ranks trials, all of which over a sample do the same work."""
        return (self.prompt_tokens + self.output_tokens) / self.timed_s if self.timed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement of one configuration, over the sample's part of this rung (0: the smallest)."""

    point: Point
    rung: int
    outcome: Outcome


class Measurer(Protocol):
    """What runs trials, or answers them from what was measured before."""

    def measure(self, point: Point, rung: int) -> Outcome:
        """Run a configuration over a rung's sample."""

    def has(self, point: Point, rung: int) -> bool:
        """Whether the answer is there already, and takes no time."""


@dataclass(slots=True)
class TrialBook:
    """Every trial so far, in order. Written by the search only."""

    trials: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """Note a trial."""
        self.trials.append(trial)

    @property
    def points(self) -> list[Point]:
        """The configurations tried, each once, in the order in which they were first."""
        return list(dict.fromkeys(trial.point for trial in self.trials))

    def speeds(self, point: Point, rung: int) -> list[float]:
        """Tokens per second, prompts included, of every run of a configuration over one sample, in order."""
        return [t.outcome.processed_per_s for t in self.trials if t.point == point and t.rung == rung and t.outcome.ok]

    def failure(self, point: Point) -> str | None:
        """Why a configuration failed, if it ever did."""
        return next((t.outcome.reason for t in self.trials if t.point == point and not t.outcome.ok), None)

    def top_rung(self, point: Point) -> int | None:
        """The largest sample over which a configuration ran."""
        return max((t.rung for t in self.trials if t.point == point and t.outcome.ok), default=None)
