"""How long rows are, and what of the memory for them would lie idle under either way to allocate it.

12 bytes a row are kept, for exact percentiles. Called by `job_plan`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (10, 50, 90, 99)

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Lengths in tokens."""

    total: int
    mean: float
    min: int
    p10: float
    p50: float
    p90: float
    p99: float
    max: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(slots=True)
class Lengths:
    """The lengths of the rows so far."""

    prompts: array[int] = field(default_factory=lambda: array("I"))  # of rows
    outputs: array[int] = field(default_factory=lambda: array("I"))  # of rows, at most, all samples together
    requests: array[int] = field(default_factory=lambda: array("I"))  # of every sample, prompt and output

    def add(self, prompt: int, outputs: Sequence[int]) -> None:
        """Take one row, with the most that each of its samples may get."""
        self.prompts.append(prompt)
        self.outputs.append(sum(outputs))
        self.requests.extend(prompt + output for output in outputs)


def distribution(lengths: Iterable[int]) -> Distribution | None:
    """Sum up lengths; None where there are none."""
    values = _counts(lengths)
    if not len(values):
        return None
    p10, p50, p90, p99 = map(float, np.percentile(values, PERCENTILES))
    return Distribution(
        int(values.sum()), float(values.mean()), int(values.min()), p10, p50, p90, p99, int(values.max())
    )


def contiguous_waste(lengths: Iterable[int], reserved: int) -> float:
    """Give the share of the slots without a token where each request gets `reserved` slots at once, in one piece."""
    values = _counts(lengths)
    return 1 - float(values.sum()) / (reserved * len(values))


def paged_waste(lengths: Iterable[int], page_size: int) -> float:
    """Give the share of the slots without a token where a request gets as many pages as it has begun, at its end."""
    values = _counts(lengths)
    return 1 - float(values.sum()) / float((-(-values // page_size) * page_size).sum())


def _counts(lengths: Iterable[int]) -> Counts:
    if isinstance(lengths, array):
        return np.frombuffer(lengths, dtype=np.uint32).astype(np.int64)
    return np.fromiter(lengths, dtype=np.int64)
