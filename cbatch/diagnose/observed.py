"""What a run's steps show: how its time was spent, and at which limits. Taken from a trace, from a simulation, or, with
less in it, from the series that every report has. Read by the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.modes import CHUNKED
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.tracefile import TracedSession

NEAR = 0.98  # of a limit counts as having reached it
SMALL_BATCH = 8  # requests
ROOMY = 0.7  # share of the cache in use below which it is no reason for anything

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps, or points that stand for several, as columns of equal length."""

    seconds: Column
    prefill_tokens: Column
    decode_tokens: Column
    running: Column  # after the step
    left_out: Column  # running requests that had no place in it; 0 where that is not known
    waiting: Column
    usage: Column  # share of the cache that requests own
    waste: Column
    is_each: bool  # else points, in which what several steps did is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Shares of the time, and means over it."""

    full: float  # as many requests as allowed, and more waiting
    at_budget: float  # as many tokens as allowed, prompts among them
    short_of_cache: float  # requests waiting that the cache had no room for
    short_usage: float  # of the cache, while it was so
    unfilled: float  # requests waiting although limits and cache had room for them: nobody joined a batch under way
    small: float  # a few requests decoding, nothing else to do
    small_requests: float  # how many, on average
    mean_usage: float
    max_usage: float
    waste: float
    longest_step: float  # in median ones; of those that decode


def from_sessions(sessions: Sequence[TracedSession]) -> Steps:
    """Take the steps of a trace."""

    def column(name: str) -> Column:
        return np.concatenate([session.column(name) for session in sessions])

    owned, free = column("owned_blocks"), column("cached_blocks") + column("free_blocks")
    return Steps(
        seconds=np.concatenate([session.step_s for session in sessions]),
        prefill_tokens=column("prefill_tokens"),
        decode_tokens=column("decode_tokens"),
        running=np.maximum(column("running"), column("requests")),
        left_out=np.maximum(0, column("running") - column("requests")),
        waiting=column("waiting"),
        usage=owned / np.maximum(owned + free, 1e-9),
        waste=np.nan_to_num(column("kv_waste")),
        is_each=True,
    )


def from_series(series: dict[str, Any], duration_s: float) -> Steps | None:
    """Take the points of a report's series, of a session that took so long; None where it has none."""
    at = np.asarray(series.get("at_s") or [], dtype=np.float64)
    if len(at) == 0:
        return None
    seconds = np.diff(np.append(at, max(duration_s, at[-1])))
    columns = {name: np.asarray(series[name], dtype=np.float64) for name in ("prefill_tokens", "decode_tokens")}
    return Steps(
        seconds=seconds,
        **columns,
        running=np.asarray(series["running"], dtype=np.float64),
        left_out=np.zeros_like(at),
        waiting=np.asarray(series["waiting"], dtype=np.float64),
        usage=np.asarray(series["cache_usage"], dtype=np.float64),
        waste=np.asarray(series["kv_waste"], dtype=np.float64),
        is_each=False,
    )


def observe(steps: Steps, engine: SimulatedEngine, mode: str) -> Observed:
    """See what the steps of an engine come to, which batched in `mode`."""
    seconds, tokens = steps.seconds, steps.prefill_tokens + steps.decode_tokens
    total = float(seconds.sum())
    waits = steps.waiting > 0
    has_place = steps.left_out == 0
    full = waits & has_place & (steps.running >= NEAR * engine.max_requests_per_batch)
    at_budget = (tokens >= NEAR * engine.max_batch_tokens) & (steps.prefill_tokens > 0)
    margin = engine.safety_margin if engine.safety_margin is not None else 0.0
    held_back = (waits | ~has_place) & ~full & ~at_budget
    is_short = (steps.usage > ROOMY) | (steps.usage > 1 - margin)
    if mode == CHUNKED and steps.is_each:
        is_short |= held_back  # nothing else holds it back: room is kept for what requests grow to, or for reading
    lacks_room = held_back & is_short
    only_decodes = (steps.prefill_tokens == 0) & (steps.decode_tokens > 0)
    small = only_decodes & ~waits & has_place & (steps.decode_tokens <= SMALL_BATCH)
    decoding = steps.decode_tokens > 0

    def share(where: NDArray[np.bool_]) -> float:
        return float(seconds[where].sum()) / total if total > 0 else 0.0

    def mean(values: Column, weights: Column = seconds) -> float:
        return float(np.average(values, weights=weights)) if weights.sum() > 0 else 0.0

    return Observed(
        full=share(full),
        at_budget=share(at_budget),
        short_of_cache=share(lacks_room),
        short_usage=mean(steps.usage[lacks_room], seconds[lacks_room]),
        unfilled=share(held_back & ~lacks_room),
        small=share(small),
        small_requests=mean(steps.decode_tokens[small], seconds[small]),
        mean_usage=mean(steps.usage),
        max_usage=float(steps.usage.max(initial=0.0)),
        waste=float(steps.waste.mean()) if len(steps.waste) else 0.0,
        longest_step=float(seconds[decoding].max() / np.median(seconds[decoding])) if decoding.any() else 1.0,
    )
