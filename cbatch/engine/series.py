"""How a run went over time, in a bounded number of points however long it is. Written by the engine, read by reports.

A point stands for a number of steps in a row, the same for all but the last one. When there are too many points, two
neighbours become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_POINTS = 512
MEANS = ("prefill_tokens", "decode_tokens", "running", "waiting", "cache_usage", "kv_waste")  # over a point's steps
SUMS = ("preemptions",)


class StepSeries:
    """Means and sums over steps, point by point."""

    def __init__(self, means: Sequence[str] = MEANS, sums: Sequence[str] = SUMS) -> None:
        self._means, self._names = frozenset(means), (*means, *sums)
        self.steps_per_point = 1
        self._at_s: list[float] = []  # when each point's first step began
        self._sums: list[list[float]] = []  # one number for each name
        self._num_in_last = 0  # steps

    def add(self, at_s: float, values: Sequence[float]) -> None:
        """Take one step: seconds since the first one began, and a value for each of the means and the sums."""
        if not self._sums or self._num_in_last == self.steps_per_point:
            if len(self._sums) == MAX_POINTS:
                self._halve()
            self._at_s.append(at_s)
            self._sums.append(list(values))
            self._num_in_last = 1
            return
        self._sums[-1] = [total + value for total, value in zip(self._sums[-1], values, strict=True)]
        self._num_in_last += 1

    def as_dict(self) -> dict[str, list[float] | int]:
        """Return the points as columns: `at_s`, and one for each value."""
        counts = [self.steps_per_point] * (len(self._sums) - 1) + [self._num_in_last] * bool(self._sums)
        columns = list(zip(*self._sums, strict=True)) or [()] * len(self._names)
        table: dict[str, list[float] | int] = {"steps_per_point": self.steps_per_point, "at_s": _short(self._at_s)}
        for name, column in zip(self._names, columns, strict=True):
            divisors = counts if name in self._means else [1] * len(counts)
            table[name] = _short([total / count for total, count in zip(column, divisors, strict=True)])
        return table

    def _halve(self) -> None:
        """Join each two points; all of them are whole, and there is an even number of them."""
        self._at_s = self._at_s[::2]
        pairs = [pair for i, pair in enumerate(pairwise(self._sums)) if i % 2 == 0]
        self._sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        self.steps_per_point *= 2


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
