"""The search: explore on a small sample, halve over larger ones, let the best run against the default in turns.

Knows nothing of engines: a `Measurer` answers a configuration and a rung with an outcome. The last rung is measured
afresh in rounds, the default in each, so that neither luck on a small sample nor a machine that slows down decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbatch.tune.noise import Gain, compare, estimate_noise
from cbatch.tune.propose import Proposer
from cbatch.tune.space import Point, Space
from cbatch.tune.trial import Measurer, Trial, TrialBook

POINTS_PER_KNOB = 8  # tried where nobody says how many
LEAST_POINTS = 3
ETA = 3  # from rung to rung, this share of the configurations goes on
NUM_FINALISTS = 3  # beside the default
MIN_ROUNDS = 3
MAX_ROUNDS = 6
NEGLIGIBLE = 0.01  # a gain that can only be smaller is not worth another round
EXPLORE_SHARE = 0.45  # of the budget: from then on nothing new is tried
HALVE_SHARE = 0.65  # of the budget: from then on only the last rung is measured


@dataclass(frozen=True, slots=True)
class Limits:
    """When to end: at so many configurations, or at so many seconds on the clock."""

    max_points: int | None
    budget_s: float | None
    clock: Callable[[], float]  # seconds that were spent so far, those of earlier processes included

    def is_spent(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is used up."""
        return self.budget_s is not None and self.clock() >= share * self.budget_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which configuration to take, and how it compares with the default; no gain where that was not measured."""

    point: Point
    gain: Gain | None
    noise: float  # standard deviation of one measurement, as a fraction
    best: Point  # the fastest but for the default; the same as `point` where it is really faster


class Search:
    """One search over one space."""

    def __init__(
        self,
        space: Space,
        num_rungs: int,
        measurer: Measurer,
        proposer: Proposer,
        limits: Limits,
        *,
        known: Sequence[Point] = (),
        on_trial: Callable[[Trial, TrialBook], None] = lambda _trial, _book: None,
    ) -> None:
        """`known` are configurations that were tried before, for which the measurer has answers."""
        assert num_rungs >= 2, "the last rung is measured afresh"
        self._space = space
        self._last = num_rungs - 1
        self._measurer = measurer
        self._proposer = proposer
        self._limits = limits
        self._known = [point for point in known if point in set(space.points) and point != space.baseline]
        self._on_trial = on_trial
        self.book = TrialBook()

    def run(self) -> Verdict:
        """Search until the limits, and decide."""
        self._explore()
        for rung in range(1, self._last):
            self._halve(rung)
        self._compare_finalists()
        return self.verdict()

    def verdict(self) -> Verdict:
        """Decide by what is known so far; the default stays where nothing is faster beyond noise."""
        baseline, book = self._space.baseline, self.book
        noise = self._noise()
        ranked = self._ranked()
        if not ranked:
            return Verdict(baseline, None, noise, baseline)
        if not self._is_measured(baseline):  # it failed, and something did not
            return Verdict(ranked[0], None, noise, ranked[0])
        rung = max((r for r in range(self._last + 1) if self._rivals(r)), default=None)
        if rung is None:
            return Verdict(baseline, None, noise, ranked[0])
        default = book.speeds(baseline, rung)
        gains = {point: compare(book.speeds(point, rung), default, noise) for point in self._rivals(rung)}
        best = max(gains, key=lambda point: gains[point].log_ratio)
        return Verdict(best if gains[best].is_real else baseline, gains[best], noise, best)

    def _explore(self) -> None:
        """Try the default, what was tried before, and new configurations, over the smallest sample."""
        self._try(self._space.baseline, 0)
        while not self._is_full() and not self._is_explored():
            point = self._proposer.propose(among=self._known)
            if point is None:
                break
            if point in self._known:
                self._known.remove(point)
            self._try(point, 0)
        if not self._is_too_late(EXPLORE_SHARE, self._space.baseline, 0):
            self._try(self._space.baseline, 0)  # a repeat: how much do measurements differ?

    def _is_explored(self) -> bool:
        """Whether the time for new configurations is over; the first few may take more than their share."""
        share = EXPLORE_SHARE if len(self.book.points) >= LEAST_POINTS else HALVE_SHARE
        return not self._known and self._limits.is_spent(share)

    def _is_full(self) -> bool:
        most = self._limits.max_points
        return len(self.book.points) >= (POINTS_PER_KNOB * len(self._space.knobs) if most is None else most)

    def _halve(self, rung: int) -> None:
        """Measure the best share over a larger sample, and the default."""
        ranked = self._ranked()
        kept = ranked[: max(NUM_FINALISTS, math.ceil(len(ranked) / ETA**rung))] if len(ranked) > NUM_FINALISTS else []
        for point in [self._space.baseline, *kept] if kept else []:
            if self._is_too_late(HALVE_SHARE, point, rung):
                return
            if self.book.failure(point) is None:
                self._try(point, rung)

    def _compare_finalists(self) -> None:
        """Measure default and finalists in turns, dropping who is clearly slower, until it is decided."""
        baseline, book = self._space.baseline, self.book
        contenders = self._ranked()[:NUM_FINALISTS]
        for number in range(MAX_ROUNDS if contenders else 0):
            order = [baseline, *contenders]
            for point in reversed(order) if number % 2 else order:
                if self._is_too_late(1.0, point, self._last):
                    return
                if book.failure(point) is None:
                    self._try(point, self._last)
            contenders = self._still_in(contenders)
            if not contenders or (number + 1 >= MIN_ROUNDS and self._is_decided(contenders)):
                return

    def _still_in(self, contenders: Sequence[Point]) -> list[Point]:
        """Leave out who failed, and who is slower than another beyond noise."""
        speeds = {point: self.book.speeds(point, self._last) for point in [self._space.baseline, *contenders]}
        running = [point for point in contenders if speeds[point] and self.book.failure(point) is None]
        noise = self._noise()
        rivals = [other for other in [self._space.baseline, *running] if speeds[other]]
        return [p for p in running if not any(compare(speeds[p], speeds[other], noise).is_loss for other in rivals)]

    def _is_decided(self, contenders: Sequence[Point]) -> bool:
        """Whether another round could hardly change the choice between the best contender and the default."""
        default = self.book.speeds(self._space.baseline, self._last)
        if not default:
            return True
        noise = self._noise()
        gains = [compare(self.book.speeds(point, self._last), default, noise) for point in contenders]
        best = max(gains, key=lambda gain: gain.log_ratio)
        return best.is_real or best.log_ratio + best.log_margin < NEGLIGIBLE

    def _is_too_late(self, share: float, point: Point, rung: int) -> bool:
        """Whether a trial would take time when this share of the budget is spent."""
        return self._limits.is_spent(share) and not self._measurer.has(point, rung)

    def _try(self, point: Point, rung: int) -> None:
        is_new = point not in self.book.points
        trial = Trial(point, rung, self._measurer.measure(point, rung))
        self.book.add(trial)
        if is_new:
            self._proposer.tell(point, trial.outcome)
        self._on_trial(trial, self.book)

    def _ranked(self) -> list[Point]:
        """Order the configurations that work, the default left out: who came furthest first, then by speed."""
        book = self.book
        places = {}
        for point in book.points:
            rung = book.top_rung(point)
            if point != self._space.baseline and rung is not None and book.failure(point) is None:
                speeds = book.speeds(point, rung)
                places[point] = (rung, sum(map(math.log, speeds)) / len(speeds))
        return sorted(places, key=lambda point: places[point], reverse=True)

    def _rivals(self, rung: int) -> list[Point]:
        """List the configurations that can be compared with the default on a rung."""
        if not self.book.speeds(self._space.baseline, rung):
            return []
        return [point for point in self._ranked() if self.book.speeds(point, rung)]

    def _is_measured(self, point: Point) -> bool:
        return self.book.top_rung(point) is not None and self.book.failure(point) is None

    def _noise(self) -> float:
        """Estimate the noise from the rounds of the last rung, before there are any from the default's repeats."""
        book, baseline = self.book, self._space.baseline
        default = book.speeds(baseline, self._last)
        pairs = [(book.speeds(point, self._last), default) for point in book.points if point != baseline]
        return estimate_noise(pairs, [book.speeds(baseline, 0)])
