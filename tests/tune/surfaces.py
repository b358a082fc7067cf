"""Made-up costs in an engine's place: how fast a configuration is follows from a formula, noise from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

from cbatch.tune.propose import Proposer
from cbatch.tune.search import Limits, Search, Verdict
from cbatch.tune.space import Knob, Point, Space
from cbatch.tune.trial import Outcome

RUNG_SHARES = (0.25, 0.5, 1.0)
TRIAL_S = 30.0  # of the whole sample, at speed 1
BUILD_S = 1.0
PAGE_SIZES = Knob("page_size", (8, 16, 32, 64, 128, 256))
BATCH_TOKENS = Knob("max_batch_tokens", (64, 128, 256, 512, 1024, 2048, 4096, 8192))

Speed = Callable[[Point], float]


def make_space(*knobs: Knob, baseline: Point) -> Space:
    points = [baseline, *(point for point in product(*(knob.choices for knob in knobs)) if point != baseline)]
    return Space(knobs, baseline, tuple(points))


def hill(space: Space, top: Point, steepness: float = 0.05) -> Speed:
    """1 at the top, less the further from it, in steps along the knobs."""

    def speed(point: Point) -> float:
        steps = [abs(a - b) for a, b in zip(space.indices(point), space.indices(top), strict=True)]
        return math.exp(-steepness * sum(step**1.5 for step in steps))

    return speed


class Bench:
    """Measures by a formula, on a clock of its own."""

    def __init__(self, speed: Speed, *, noise: float = 0.0, drift: float = 0.0, seed: int = 0) -> None:
        """`noise` is a standard deviation, as a fraction; `drift` what the machine gains a second."""
        self.now = 0.0
        self.longest_s = 0.0
        self.asked: list[tuple[Point, int]] = []
        self._speed = speed
        self._noise = noise
        self._drift = drift
        self._rng = random.Random(seed)

    def has(self, _point: Point, _rung: int) -> bool:
        return False

    def measure(self, point: Point, rung: int) -> Outcome:
        self.asked.append((point, rung))
        speed = self._speed(point) * math.exp(self._rng.gauss(0, self._noise) + self._drift * self.now)
        wall_s = BUILD_S + TRIAL_S * RUNG_SHARES[rung] / speed
        self.now += wall_s
        self.longest_s = max(self.longest_s, wall_s)
        return Outcome(status="ok", timed_s=wall_s - BUILD_S, output_tokens=round(1e6 * RUNG_SHARES[rung]))


def search(space: Space, bench: Bench, *, trials: int | None = None, budget_s: float | None = None) -> Search:
    """A search over `bench`."""
    limits = Limits(trials, budget_s, lambda: bench.now)
    return Search(space, len(RUNG_SHARES), bench, Proposer(space, seed=0), limits)


def run(space: Space, bench: Bench, *, trials: int | None = None, budget_s: float | None = None) -> Verdict:
    return search(space, bench, trials=trials, budget_s=budget_s).run()
