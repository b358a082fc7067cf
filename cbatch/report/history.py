"""What happened when: a run's steps over time and the states of some of its requests, in bounded memory.

Read from the trace where there is one, else from the series that every report has. Sessions of a resumed job follow
one another. Called by `content`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbatch.engine.series import StepSeries
from cbatch.errors import InputError
from cbatch.io.gziplog import read_log

MEANS = ("prefill_tokens", "decode_tokens", "running", "owned", "cached", "empty")  # the last three: of the cache
SUMS = ("moved",)
MAX_REQUESTS = 120  # in the timeline
PENDING, FINISHED = "pending", "finished"


@dataclass(frozen=True, slots=True)
class Segment:
    """A time that a request spent in one state, in seconds of the run."""

    state: str
    start: float
    stop: float


@dataclass(slots=True)
class RequestHistory:
    """The states of one request, one after another."""

    number: int
    sample: int
    segments: list[Segment] = field(default_factory=list)
    state: str = ""
    since: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated: int = 0

    def change(self, state: str, at: float) -> None:
        """Come into a state, out of the one before."""
        if self.state:
            self.segments.append(Segment(self.state, self.since, max(self.since, at)))
            self.preemptions += state == PENDING
        self.state, self.since = state, at


@dataclass(frozen=True, slots=True)
class History:
    """A run over time. Columns are lists of equal length."""

    end_s: float
    columns: dict[str, list[float]]
    requests: list[RequestHistory]
    sessions_at: list[float]  # where each but the first begins
    has_trace: bool


class _Sample:
    """Keeps the histories of evenly spaced requests: every one at first, then every second, and so on."""

    def __init__(self) -> None:
        self._every = 1
        self._kept: dict[tuple[int, int, int], RequestHistory] = {}

    def take(self, session: int, offset: float, values: list[Any]) -> None:
        number, sample, state, at, prompt_tokens, generated, _ = values
        if number % self._every:
            return
        request = self._kept.get((session, number, sample))
        if request is None:
            if len(self._kept) >= 2 * MAX_REQUESTS:
                self._thin_out()
                if number % self._every:
                    return
            request = self._kept[session, number, sample] = RequestHistory(number, sample)
        request.change(state, offset + at)
        request.prompt_tokens, request.generated = prompt_tokens, generated

    def requests(self) -> list[RequestHistory]:
        while len(self._kept) > MAX_REQUESTS:
            self._thin_out()
        return sorted(self._kept.values(), key=lambda r: (r.segments[0].start if r.segments else r.since, r.number))

    def _thin_out(self) -> None:
        self._every *= 2
        before = len(self._kept)
        self._kept = {key: request for key, request in self._kept.items() if key[1] % self._every == 0}
        if len(self._kept) == before:  # many samples of few prompts: halve those
            self._kept = dict(list(self._kept.items())[::2])


def read_history(trace: Path) -> History:
    """Read a trace in one go. Raises InputError."""
    try:
        return _read_history(trace)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(
            f"the trace {trace} is damaged: {type(error).__name__}, {error}",
            hint="move it away: the page is made of the report alone then",
        ) from error


def _read_history(trace: Path) -> History:
    series, sample = StepSeries(MEANS, SUMS), _Sample()
    offset = end = 0.0
    session = 0
    sessions_at: list[float] = []
    for line in read_log(trace):
        if "session" in line:
            sessions_at += [end] if session else []
            session, offset = line["session"], end
            continue
        at = offset + line["at_s"]
        end = max(end, at + line["schedule_s"] + line["run_s"] + line["update_s"])
        total = line["owned_blocks"] + line["cached_blocks"] + line["free_blocks"] or 1.0
        owned, cached = line["owned_blocks"] / total, line["cached_blocks"] / total
        tokens = (line["prefill_tokens"], line["decode_tokens"])
        running, moved = max(line["running"], line["requests"]), line["offloads"] + line["soft_resets"]
        series.add(at, (*tokens, running, owned, cached, owned * (line["kv_waste"] or 0.0), moved))
        for values in line["events"]:
            sample.take(session, offset, values)
    columns = {name: values for name, values in series.as_dict().items() if isinstance(values, list)}
    return History(end, columns, sample.requests(), sessions_at, has_trace=True)


def reported_history(report: dict[str, Any]) -> History | None:
    """Take the series of a report; None where there is none."""
    series = report.get("series") or {}
    if not series.get("at_s"):
        return None
    usage, waste = series["cache_usage"], series["kv_waste"]
    columns = {name: series[name] for name in ("at_s", "prefill_tokens", "decode_tokens", "running")}
    columns |= {"owned": usage, "cached": [0.0] * len(usage), "moved": series["preemptions"]}
    columns["empty"] = [owned * empty for owned, empty in zip(usage, waste, strict=True)]
    end = (report.get("session") or {}).get("generate_s") or report.get("generate_s") or 0.0
    return History(max(float(end), columns["at_s"][-1]), columns, [], [], has_trace=False)
