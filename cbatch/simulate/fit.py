"""Fits a cost model to the steps of a run: least squares, no constant negative. Called by `simulate` and `diagnose`.

There are few constants, so the best solution without negative ones is found by trying every set of them: where the
unconstrained solution of a set is not negative, it is that set's best, and one of the sets is the answer. Constants
that the run says nothing about (steps that are all alike) come out as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from cbatch.errors import InputError
from cbatch.simulate.cost import CostModel
from cbatch.simulate.tracefile import TracedSession

MIN_STEPS = 8
HIDDEN_CANDIDATES = (0, *(2**i for i in range(3, 13)))
HIDDEN_GAIN = 0.9  # hiding tokens must leave so small a share of the squared error, or it is chance

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model, and how well it tells the steps that it was fitted to."""

    cost: CostModel
    num_steps: int
    typical_error: float  # of a step's duration, a share of the mean

    def describe(self) -> str:
        """Spell how good it is in one line."""
        return f"fitted to {self.num_steps} steps, which it tells within {self.typical_error:.0%} (typically)"


def fit_cost(sessions: Sequence[TracedSession]) -> Fit:
    """Fit to all steps of some sessions. Raises InputError where they are too few."""
    durations = np.concatenate([session.typical_step_s for session in sessions])
    if len(durations) < MIN_STEPS:
        raise InputError(f"{len(durations)} steps are too few to fit a cost to", hint="trace a longer run")
    query, kv, requests, pairs = (
        np.concatenate([sum((session.column(name) for name in names), start=np.zeros(1)) for session in sessions])
        for names in (("prefill_tokens", "decode_tokens"), ("kv_tokens_read",), ("requests",), ("pairs",))
    )
    best: tuple[float, int, Matrix] | None = None
    for hidden in HIDDEN_CANDIDATES:
        if hidden and hidden >= query.max():
            break
        table = np.stack([np.ones_like(query), np.maximum(0, query - hidden), kv, requests, pairs], axis=1)
        constants, error = solve_non_negative(table, durations)
        if best is None or error < HIDDEN_GAIN * best[0]:
            best = error, hidden, constants
    assert best is not None
    error, hidden, constants = best
    names = ("per_step_s", "per_query_token_s", "per_kv_token_s", "per_request_s", "per_pair_s")
    cost = CostModel(**dict(zip(names, constants.tolist(), strict=True)), hidden_tokens=hidden)
    return Fit(cost, len(durations), float(np.sqrt(error / len(durations)) / durations.mean()))


def solve_non_negative(table: Matrix, values: Matrix) -> tuple[Matrix, float]:
    """Solve `table` · x = `values` by least squares over all x without negative entries; return x and the error.

    table: [rows, columns], few columns, which may be of any scale and depend on one another. The error is the sum of
    the squares.
    """
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    scaled = table / scale
    gram, right, total = scaled.T @ scaled, scaled.T @ values, float(values @ values)
    best, least = np.zeros(table.shape[1]), total
    for count in range(1, table.shape[1] + 1):
        for chosen in map(list, combinations(range(table.shape[1]), count)):
            part = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], right[chosen], rcond=1e-10)[0]
            error = total - 2 * float(part @ right[chosen]) + float(part @ gram[np.ix_(chosen, chosen)] @ part)
            if (part >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(table.shape[1]), error
                best[chosen] = part
    return best / scale, max(0.0, least)
