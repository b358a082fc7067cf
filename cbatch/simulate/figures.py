"""What a simulated run comes to: throughput, latencies, goodput, counts. Written by the simulator, read by commands.

Times to the first token are kept one by one; times between tokens, of which there may be billions, in a histogram
whose bins are half a percent wide.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cbatch.engine.step import FinishedRequest

BIN_WIDTH = 0.005  # of the logarithm
SHORTEST_S = 1e-7
NUM_BINS = 6000  # up to about a week
BUFFERED_TIMES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run."""

    requests: int
    refused: int  # that can never fit
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    steps: int
    duration_s: float  # first step's start → last step's end
    busy_s: float  # of it, spent in steps
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    itl_mean_s: float
    itl_p99_s: float  # over all pairs of tokens of all requests
    e2e_mean_s: float
    goodput_tokens_per_s: float | None
    mean_running: float
    mean_cache_usage: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Counts as the run goes on."""

    refused: int = 0
    steps: int = 0
    busy_s: float = 0.0
    began: float | None = None
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    running_s: float = 0.0  # requests in the batch, by the time that it took
    usage_sum: float = 0.0
    _ttft_s: array[float] = field(default_factory=lambda: array("d"))
    _itl_s: array[float] = field(default_factory=lambda: array("d"))  # means; -1 with fewer than two tokens
    _e2e_s: array[float] = field(default_factory=lambda: array("d"))
    _num_tokens: array[int] = field(default_factory=lambda: array("q"))
    _times: array[float] = field(default_factory=lambda: array("d"))  # of tokens, request after request
    _ends: array[int] = field(default_factory=lambda: array("q"))  # of requests in _times
    _bins: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS, dtype=np.int64))

    def count_step(self, began: float, duration: float, num_requests: int, usage: float) -> None:
        self.steps += 1
        self.busy_s += duration
        self.running_s += num_requests * duration
        self.usage_sum += usage
        self.began = began if self.began is None else self.began
        self.ended = began + duration

    def count_finished(self, finished: Sequence[FinishedRequest]) -> None:
        for request in (f.request for f in finished):
            times, created = request.token_times, request.created_at
            self.prompt_tokens += request.num_prompt_tokens
            self.output_tokens += len(times)
            self.cached_tokens += request.cached_tokens
            self.computed_tokens += request.computed_tokens
            self.recomputed_tokens += request.recomputed_tokens
            self.preemptions += request.preemptions
            self._ttft_s.append(times[0] - created)
            self._e2e_s.append(times[-1] - created)
            self._itl_s.append((times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else -1.0)
            self._num_tokens.append(len(times))
            self._times.extend(times)
            self._ends.append(len(self._times))
        if len(self._times) >= BUFFERED_TIMES:
            self._sort_gaps()

    def figures(self, goodput_ttft: float | None, goodput_itl: float | None) -> Figures:
        """Return what it all comes to, goodput by these targets."""
        self._sort_gaps()
        ttft, itl, e2e = (np.frombuffer(column) for column in (self._ttft_s, self._itl_s, self._e2e_s))
        num_tokens = np.frombuffer(self._num_tokens, dtype=np.int64)
        duration = self.ended - (self.began or 0.0)
        gaps = num_tokens - 1
        good = (ttft <= (goodput_ttft or np.inf)) & (itl <= (goodput_itl or np.inf))
        asked = goodput_ttft is not None or goodput_itl is not None
        return Figures(
            requests=len(ttft),
            refused=self.refused,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
            duration_s=duration,
            busy_s=self.busy_s,
            output_tokens_per_s=_ratio(self.output_tokens, duration),
            ttft_mean_s=float(ttft.mean()) if len(ttft) else 0.0,
            ttft_p99_s=float(np.percentile(ttft, 99)) if len(ttft) else 0.0,
            itl_mean_s=_ratio(float((itl * gaps)[gaps > 0].sum()), float(gaps.sum())),
            itl_p99_s=self._gap_percentile(0.99),
            e2e_mean_s=float(e2e.mean()) if len(e2e) else 0.0,
            goodput_tokens_per_s=_ratio(float(num_tokens[good].sum()), duration) if asked else None,
            mean_running=_ratio(self.running_s, self.busy_s),
            mean_cache_usage=_ratio(self.usage_sum, self.steps),
        )

    def _sort_gaps(self) -> None:
        """Move the buffered times into the histogram."""
        times, ends = np.frombuffer(self._times), np.frombuffer(self._ends, dtype=np.int64)
        if len(times):
            within = np.ones(len(times) - 1, dtype=bool)
            within[ends[:-1] - 1] = False  # from one request's last token to the next one's first
            gaps = np.maximum(np.diff(times)[within], SHORTEST_S)
            bins = (np.log(gaps / SHORTEST_S) / BIN_WIDTH).astype(np.int64)
            self._bins += np.bincount(np.minimum(bins, NUM_BINS - 1), minlength=NUM_BINS)
        self._times, self._ends = array("d"), array("q")

    def _gap_percentile(self, share: float) -> float:
        total = int(self._bins.sum())
        if total == 0:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self._bins), share * total))
        return float(SHORTEST_S * np.exp((index + 0.5) * BIN_WIDTH))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
