"""Which configuration to try next: Optuna's Gaussian process over the grid of choices, an extra of this package.

A grid has few points and a trial takes long, so a point is never proposed twice: where the process would, or where it
names a combination that cannot work, the nearest point that was not tried stands in.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cbatch.errors import UsageError
from cbatch.tune.space import Knob, Point, Space
from cbatch.tune.trial import Outcome

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

PACKAGES = ("optuna", "scipy")
NUM_RANDOM = 4  # trials before the process has anything to go by, the default among them


def check_installed() -> None:
    """Raise UsageError where the packages are missing that a search needs."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        words = f"the package {missing[0]}" if len(missing) == 1 else f"the packages {' and '.join(missing)}"
        raise UsageError(f"tune needs {words}", hint="pip install 'cbatch[tune]'")


class Proposer:
    """Proposes points of a space and learns from what became of them; the same for the same seed and outcomes."""

    def __init__(self, space: Space, seed: int) -> None:
        import optuna

        self._space = space
        self._left = dict.fromkeys(point for point in space.points if point != space.baseline)
        self._distributions = {knob.name: _distribution(knob) for knob in space.knobs}
        self._worst = math.inf
        with _quietly():
            sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=NUM_RANDOM)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)

    def propose(self, among: Sequence[Point] = ()) -> Point | None:
        """Return a point that was neither proposed nor told, of `among` where any are named; None once there is none.

        A search that goes on names what it had tried, and is led the same way as before.
        """
        candidates = [point for point in among if point in self._left] or self._left
        if not candidates:
            return None
        with _quietly():
            import optuna

            asked = self._study.ask(self._distributions)
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)  # what it came to is told point by point
        wanted = tuple(float(asked.params[name]) for name in self._space.names)
        nearest = min(candidates, key=lambda point: _distance(self._space, point, wanted))
        del self._left[nearest]
        return nearest

    def tell(self, point: Point, outcome: Outcome) -> None:
        """Learn what became of a point; a failed one counts as the slowest so far."""
        import optuna

        value = math.log(outcome.processed_per_s) if outcome.ok and outcome.processed_per_s > 0 else None
        self._worst = min(self._worst, self._worst if value is None else value)
        self._left.pop(point, None)
        if math.isinf(self._worst):
            return
        params = dict(zip(self._space.names, self._space.indices(point), strict=True))
        with _quietly():
            frozen = optuna.trial.create_trial(
                params=params, distributions=self._distributions, value=self._worst if value is None else value
            )
            self._study.add_trial(frozen)


def _distribution(knob: Knob) -> BaseDistribution:
    """Spread a knob's choices by their place; those without an order are equally far apart."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if knob.is_ordered:
        return IntDistribution(0, len(knob.choices) - 1)
    return CategoricalDistribution(range(len(knob.choices)))


def _distance(space: Space, point: Point, wanted: tuple[float, ...]) -> float:
    """How far a point is from a wished one, in steps along the knobs."""
    total = 0.0
    for knob, index, wish in zip(space.knobs, space.indices(point), wanted, strict=True):
        total += abs(index - wish) if knob.is_ordered else float(index != wish)
    return total


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the library's notices off the terminal: its sampler warns that it is new, its study logs every trial."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
