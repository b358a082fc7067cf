"""What a run's token times add up to: the figures that are compared. Called for every run, ours and the peers' alike.

All rows are there when a run begins, so the time to a row's first token counts from the run's start. Goodput is as in a
job's report: the tokens, a second, of the rows whose first token came within one target and whose mean time between
tokens was within the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

import numpy as np

from cbatch.jobs.totals import Targets

TAIL = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run, or the medians of several; None where there was nothing to measure."""

    output_tokens_per_s: float
    generate_s: float  # the run's start → its last token
    load_s: float
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    itl_mean_s: float | None  # over all pairs of neighbouring tokens of all rows
    itl_p99_s: float | None
    goodput_tokens_per_s: float | None = None  # None where no target was given
    good_rows: float | None = None  # share of the rows that kept the targets
    peak_rss_bytes: float | None = None  # of the process that ran it
    peak_device_bytes: float | None = None  # of the accelerator's memory, where there is one

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def measure(
    token_times: Sequence[Sequence[float]],
    targets: Targets,
    *,
    load_s: float = 0.0,
    peak_rss_bytes: float | None = None,
    peak_device_bytes: float | None = None,
) -> Figures:
    """Add up a run from the seconds, from its start, at which every row's tokens came; every row has one at least."""
    first = np.array([times[0] for times in token_times])
    gaps = [np.diff(np.asarray(times)) for times in token_times]
    all_gaps = np.concatenate(gaps) if gaps else np.array([])
    generate_s = max((times[-1] for times in token_times), default=0.0)
    asked = targets.ttft_s is not None or targets.itl_s is not None
    good = [
        len(times)
        for times, between in zip(token_times, gaps, strict=True)
        if targets.are_met({"ttft_s": times[0], "itl_mean_s": float(between.mean()) if len(between) else None})
    ]
    return Figures(
        output_tokens_per_s=_per_second(sum(map(len, token_times)), generate_s),
        generate_s=generate_s,
        load_s=load_s,
        ttft_mean_s=_mean(first),
        ttft_p99_s=_tail(first),
        itl_mean_s=_mean(all_gaps),
        itl_p99_s=_tail(all_gaps),
        goodput_tokens_per_s=_per_second(sum(good), generate_s) if asked else None,
        good_rows=len(good) / len(token_times) if asked and token_times else None,
        peak_rss_bytes=peak_rss_bytes,
        peak_device_bytes=peak_device_bytes,
    )


def medians(runs: Sequence[Figures]) -> Figures:
    """Take each figure's median by itself, over the runs that have it."""
    taken: dict[str, float | None] = {}
    for name in (field.name for field in fields(Figures)):
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        taken[name] = median(values) if values else None
    return Figures(**taken)  # type: ignore[arg-type]


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    return float(values.mean()) if len(values) else None


def _tail(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    return float(np.percentile(values, TAIL)) if len(values) else None


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
