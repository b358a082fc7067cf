"""How much measurements of the same thing differ, and whether one configuration is really faster than another.

All in logarithms, so that differences are ratios. Leaves out which configurations are compared (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

# What is believed of the noise before anything was measured twice, and how many repeats that belief weighs as much as.
PRIOR_NOISE = 0.03
PRIOR_WEIGHT = 1
NUM_DEVIATIONS = 2.5  # between two that are told apart: several are compared, several times

MEDIAN_SPREAD = math.sqrt(math.pi / 2)  # of a median, over that of a mean of as many measurements

Pair = tuple[Sequence[float], Sequence[float]]  # measurements of two configurations, in turns


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster a configuration is than another: a ratio minus one, and what of it could be noise."""

    log_ratio: float
    log_margin: float

    @property
    def ratio(self) -> float:
        """0.05 is five per cent more tokens per second."""
        return math.expm1(self.log_ratio)

    @property
    def margin(self) -> float:
        """As `ratio`: a gain that is not larger may be none."""
        return math.expm1(self.log_margin)

    @property
    def is_real(self) -> bool:
        return self.log_ratio > self.log_margin

    @property
    def is_loss(self) -> bool:
        return self.log_ratio < -self.log_margin


def estimate_noise(pairs: Iterable[Pair], repeats: Iterable[Sequence[float]]) -> float:
    """Estimate the standard deviation of a measurement's logarithm.

    From pairs of configurations measured in turns where there are any: their ratios vary with the noise of both, and
    not with what slows both down. Else from repeats of one.
    """
    squares, weight = PRIOR_WEIGHT * PRIOR_NOISE**2, float(PRIOR_WEIGHT)
    ratios = [_log_ratios(speeds, others) for speeds, others in pairs]
    if any(len(group) > 1 for group in ratios):
        groups, share = ratios, 0.5
    else:
        groups, share = [[math.log(speed) for speed in group] for group in repeats], 1.0
    for group in groups:
        squares += share * sum((value - fmean(group)) ** 2 for value in group)
        weight += max(0, len(group) - 1)
    return math.sqrt(squares / weight)


def compare(speeds: Sequence[float], others: Sequence[float], noise: float) -> Gain:
    """Compare two configurations that were measured in turns: the i-th measurements are of about the same moment.

    A machine that slows down between rounds slows both, so each round gives a ratio of its own, of which the middle
    one counts.
    """
    ratios = _log_ratios(speeds, others)
    return Gain(median(ratios), NUM_DEVIATIONS * MEDIAN_SPREAD * noise * math.sqrt(2 / len(ratios)))


def _log_ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [math.log(mine / other) for mine, other in zip(speeds, others, strict=False)]
