"""What is searched: the settings, the values that each may take, and which of their combinations are worth a trial.

Built once, from the plan of the default configuration and of every other one: a combination that does not fit the
memory, or in which the plan would not take a value as it is given, is left out here and never tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from cbatch.config import EngineConfig
from cbatch.engine.policies import SCHEDULERS
from cbatch.errors import UsageError

Value = int | str | bool
Point = tuple[Value, ...]  # one value for each knob

ALWAYS = ("page_size", "max_batch_tokens")
CHOICES: dict[str, tuple[Value, ...]] = {
    "page_size": (8, 16, 32, 64, 128, 256),
    "max_batch_tokens": tuple(2**power for power in range(5, 16)),
    "max_requests_per_batch": tuple(2**power for power in range(0, 12)),
    "scheduler_type": tuple(SCHEDULERS),
    "allow_block_sharing": (False, True),
}
ROWS_PER_PLACE = 2  # a limit on a batch shows only where a sample fills the batch and then refills it


class TrialPlan(Protocol):
    """What is read of an engine's plan."""

    @property
    def page_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_batch_tokens(self) -> int: ...

    @property
    def max_requests_per_batch(self) -> int: ...

    def settings(self) -> dict[str, dict[str, object]]:
        """Return name → value and reason."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A searched setting and its values, those that are numbers in their order."""

    name: str
    choices: tuple[Value, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether neighbouring values are alike."""
        return all(type(choice) is int for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination that may be tried, the default one among them."""

    knobs: tuple[Knob, ...]
    baseline: Point
    points: tuple[Point, ...]

    def settings(self, point: Point) -> dict[str, Value]:
        """Give name → value; nothing for the default, which is the configuration as given."""
        return {} if point == self.baseline else dict(zip(self.names, point, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """The searched settings."""
        return tuple(knob.name for knob in self.knobs)

    def indices(self, point: Point) -> tuple[int, ...]:
        """Give the place of each value among its knob's choices."""
        return tuple(knob.choices.index(value) for knob, value in zip(self.knobs, point, strict=True))


def choose_names(config: EngineConfig, search: Sequence[str]) -> tuple[str, ...]:
    """Choose which settings to search: a given one only where it is named. Raises UsageError."""
    for name in search:
        if name.replace("-", "_") not in CHOICES:
            raise UsageError(f"--search must be one of {', '.join(CHOICES)}: it is '{name}'")
    asked = {name.replace("-", "_") for name in search}
    names = tuple(n for n in CHOICES if n in asked or (n in ALWAYS and getattr(config, n) is None))
    if not names:
        raise UsageError(
            f"{' and '.join(ALWAYS)} are given, so nothing is left to search",
            hint=f"--search {ALWAYS[0]} searches it all the same, the given value being the default to beat",
        )
    return names


def build_space(
    names: Sequence[str],
    plan: Callable[[Mapping[str, Value]], TrialPlan],
    *,
    num_requests: int,
    num_tokens: int,
) -> Space:
    """Find the combinations for a sample of so many requests whose prompts have so many tokens.

    `plan` answers settings with a plan, or raises UsageError where they cannot work; so does the default's here.
    """
    default = plan({})
    knobs = tuple(_knob(name, getattr(default, name), default, num_requests, num_tokens) for name in names)
    baseline = tuple(getattr(default, name) for name in names)
    points = [baseline]
    for point in product(*(knob.choices for knob in knobs)):
        if point != baseline and _is_worth_a_trial(dict(zip(names, point, strict=True)), plan, default, num_requests):
            points.append(point)
    return Space(knobs, baseline, tuple(points))


def _knob(name: str, default: Value, plan: TrialPlan, num_requests: int, num_tokens: int) -> Knob:
    """Leave out the values between which this sample shows no difference."""
    choices = list(CHOICES[name])
    if name == "page_size":
        choices = [choice for choice in choices if int(choice) <= plan.max_model_len]
    elif name == "max_batch_tokens":  # the first that takes the whole sample at once is the last that differs
        choices = [choice for choice in choices if int(choice) < 2 * (num_tokens + num_requests)]
    elif name == "max_requests_per_batch":
        choices = [choice for choice in choices if int(choice) * ROWS_PER_PLACE <= num_requests]
    if default not in choices:
        choices.append(default)
    return Knob(name, tuple(sorted(choices)) if all(type(choice) is int for choice in choices) else tuple(choices))


def _is_worth_a_trial(
    settings: Mapping[str, Value],
    plan: Callable[[Mapping[str, Value]], TrialPlan],
    default: TrialPlan,
    num_requests: int,
) -> bool:
    """Whether the settings fit, are taken as they are, and can only gain: no row may fail that the default runs."""
    try:
        planned = plan(settings)
    except UsageError:
        return False
    if any(getattr(planned, name) != value for name, value in settings.items()):
        return False
    longest = min(default.max_model_len, default.num_blocks * default.page_size)
    if planned.num_blocks * planned.page_size < longest:
        return False
    places = planned.max_requests_per_batch
    return places >= default.max_requests_per_batch or places * ROWS_PER_PLACE <= num_requests
