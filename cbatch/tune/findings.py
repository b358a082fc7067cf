"""What a search found, in numbers that can be shown: a line for each configuration. Used by `tuned` and `cli`.

Speeds over samples of different sizes do not compare, so a configuration stands with the speed that it had over the
largest sample it ran, and with how that compares with the default's over the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from cbatch.tune.calibrate import Sample
from cbatch.tune.search import Verdict
from cbatch.tune.space import Point, Space, Value
from cbatch.tune.trial import TrialBook

NOISY = 0.1  # a standard deviation of one measurement that hides most gains


@dataclass(frozen=True, slots=True)
class Line:
    """One configuration."""

    settings: dict[str, Value]
    is_default: bool
    is_chosen: bool
    num_rows: int = 0  # of the largest sample
    tokens_per_s: float = 0.0  # median over them
    speeds: tuple[float, ...] = ()  # all of them
    times_default: float | None = None  # the default's speed over the same sample being one
    memory_bytes: int = 0
    failure: str | None = None

    @property
    def spread(self) -> float:
        """Half the distance from the slowest to the fastest run."""
        return (max(self.speeds) - min(self.speeds)) / 2 if self.speeds else 0.0


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a search knows when it ends, or is stopped."""

    space: Space
    sample: Sample
    book: TrialBook
    verdict: Verdict

    @property
    def unit(self) -> str:
        return "tokens/s with prompts" if self.sample.counts_prompts else "output tokens/s"

    @property
    def is_noisy(self) -> bool:
        """Whether measurements differed so much that something else must have run."""
        return self.verdict.noise > NOISY

    @property
    def keeps_default(self) -> bool:
        return self.verdict.point == self.space.baseline

    def lines(self) -> list[Line]:
        """Give a line for each configuration: the chosen one, then who came furthest, by speed."""
        lines = [self.line(point) for point in self.book.points]
        return sorted(lines, key=lambda line: (not line.is_chosen, -line.num_rows, -(line.times_default or 0.0)))

    def line(self, point: Point) -> Line:
        """Sum up what became of one configuration."""
        settings = dict(zip(self.space.names, point, strict=True))
        flags = (point == self.space.baseline, point == self.verdict.point)
        rung, failure = self.book.top_rung(point), self.book.failure(point)
        if rung is None or failure is not None:
            return Line(settings, *flags, failure=failure)
        runs = [t.outcome for t in self.book.trials if t.point == point and t.rung == rung]
        speeds = [self.sample.speed(outcome) for outcome in runs]
        middle = median(speeds)
        default = [
            self.sample.speed(t.outcome)
            for t in self.book.trials
            if t.point == self.space.baseline and t.rung == rung and t.outcome.ok
        ]
        return Line(
            settings,
            *flags,
            num_rows=self.sample.rungs[rung],
            speeds=tuple(speeds),
            tokens_per_s=middle,
            times_default=middle / median(default) if default else None,
            memory_bytes=max(outcome.memory_bytes for outcome in runs),
        )

    def conclusion(self) -> str:
        """Say in one sentence which settings are chosen, and why."""
        verdict = self.verdict
        chosen = spell(dict(zip(self.space.names, verdict.point, strict=True)))
        if verdict.gain is None and self.keeps_default:
            return f"the default is kept, nothing else was measured beside it: {chosen}"
        if verdict.gain is None:
            return f"{chosen} works; the default does not: {self.book.failure(self.space.baseline)}"
        gain, margin = verdict.gain.ratio, verdict.gain.margin
        if self.keeps_default:
            best = spell(dict(zip(self.space.names, verdict.best, strict=True)))
            return (
                f"the default is kept: {chosen}; nothing is faster beyond noise (the next best, {best}, "
                f"{gain:+.1%}; noise {margin:.1%})"
            )
        return f"{chosen}: {gain:+.1%} over the default (noise {margin:.1%})"


def spell(settings: dict[str, Value]) -> str:
    """Spell settings in one line."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())
