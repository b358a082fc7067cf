"""A run's step trace read back, as `run --trace` wrote it: steps as columns, requests with their lengths.

Read by the fit, by `diagnose` and by `report`. What a killed run left is read as far as it goes.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.modes import CHUNKED, MODES
from cbatch.engine.request import RequestStatus
from cbatch.errors import InputError
from cbatch.io.gziplog import read_log
from cbatch.jobs.paths import TRACE_SUFFIX, report_path, trace_path
from cbatch.jobs.report import read_report
from cbatch.simulate.settings import SimulatedEngine

COLUMNS = (
    "at_s",
    "schedule_s",
    "run_s",
    "update_s",
    "requests",
    "prefill_tokens",
    "decode_tokens",
    "kv_tokens_read",
    "pairs",
    "running",
    "waiting",
    "owned_blocks",
    "cached_blocks",
    "free_blocks",
    "kv_waste",
)
OUTLYING = 4.0  # medians
TRACE_HINT = "run the job with --trace, and --restart where it is finished already"


class FinishedLengths(NamedTuple):
    """A request that finished, and what it came to."""

    request: int
    sample: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class TracedSession:
    """One process's part of a trace: all of a job that was never resumed."""

    settings: dict[str, Any]
    layers: list[tuple[int | None, int]]
    num_host_pages: int = 0
    mode: str = CHUNKED  # how requests were batched
    finished: list[FinishedLengths] = field(default_factory=list)
    _columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a column of the steps; what was not known is not a number."""
        return np.frombuffer(self._columns[name], dtype=np.float64)

    @property
    def num_steps(self) -> int:
        return len(self._columns["at_s"])

    @property
    def step_s(self) -> NDArray[np.float64]:
        """How long each step took, in seconds, all that is done between two steps included, waiting for work not."""
        own = self.column("schedule_s") + self.column("run_s") + self.column("update_s")
        until_next = np.append(np.diff(self.column("at_s")), np.inf)
        idle = (self.column("running") == 0) & (self.column("waiting") == 0)
        return np.where(idle | np.isinf(until_next), own, until_next)

    @property
    def typical_step_s(self) -> NDArray[np.float64]:
        """The same, with no more between two steps than there mostly is: what was waited for is no step's cost."""
        own = self.column("schedule_s") + self.column("run_s") + self.column("update_s")
        between = self.step_s - own
        return np.asarray(own + np.minimum(between, OUTLYING * np.median(between)))

    @property
    def duration_s(self) -> float:
        """From the first step's start to the last one's end."""
        if self.num_steps == 0:
            return 0.0
        last = sum(self._columns[name][-1] for name in ("schedule_s", "run_s", "update_s"))
        return float(self._columns["at_s"][-1] + last)

    def engine(self) -> SimulatedEngine:
        """Return the engine that ran. Raises InputError where the trace does not say enough of it."""
        try:
            return SimulatedEngine(
                **{name: self.settings[name] for name in ENGINE_SETTINGS},
                num_host_pages=self.num_host_pages,
                layer_windows=tuple(window for window, count in self.layers for _ in range(count)),
            )
        except KeyError as error:
            raise InputError(f"the trace does not say what {error.args[0]} was", hint=TRACE_HINT) from error
        except (OverflowError, TypeError) as error:
            raise InputError(f"the trace names settings that no engine has: {error}", hint=TRACE_HINT) from error

    def add(self, step: dict[str, Any]) -> None:
        """Take one step."""
        for name, column in self._columns.items():
            value = step.get(name)
            column.append(np.nan if value is None else _finite(value))
        for request, sample, state, _at, prompt, generated, cached in step["events"]:
            if state == RequestStatus.FINISHED.value and generated > 0:
                self.finished.append(FinishedLengths(request, sample, prompt, generated, cached))


ENGINE_SETTINGS = (
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_requests_per_batch",
    "max_model_len",
    "scheduler_type",
    "safety_margin",
    "allow_block_sharing",
)


def output_of(named: Path) -> Path:
    """Return the output whose trace may have been named in its place."""
    return named.with_name(named.name.removesuffix(TRACE_SUFFIX))


def find_trace(output: Path) -> Path:
    """Return where the trace of an output is, which may be named itself. Raises InputError where there is none."""
    path = trace_path(output_of(output))
    if not path.is_file():
        raise InputError(f"there is no trace of {output} at {path}", hint=TRACE_HINT)
    return path


def read_trace(path: Path) -> list[TracedSession]:
    """Read all sessions that ran a step. Raises InputError, for a trace that lacks steps of a finished run too."""
    sessions: list[TracedSession] = []
    for line in read_log(path):
        try:
            if "session" in line:
                sessions.append(_session(line))
            elif sessions:
                sessions[-1].add(line)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(
                f"the trace {path} is damaged: {type(error).__name__}, {error}", hint=TRACE_HINT
            ) from error
    sessions = [session for session in sessions if session.num_steps]
    if not sessions:
        raise InputError(f"the trace {path} holds no step", hint=TRACE_HINT)
    steps = read_report(report_path(output_of(path))).get("steps")
    if steps and steps not in [session.num_steps for session in sessions]:
        raise InputError(
            f"the trace {path} is damaged, or not of the run that is reported: it holds {sessions[-1].num_steps} "
            f"steps, and the report counts {steps}",
            hint="run the job with --trace and --restart",
        )
    return sessions


def _session(line: dict[str, Any]) -> TracedSession:
    """Read a session's first line. Raises KeyError, TypeError and ValueError where it is none."""
    layers = [(window if window is None else int(window), int(count)) for window, count in line["layers"]]
    mode = line.get("mode", CHUNKED)
    if mode not in MODES:
        raise ValueError(f"no mode is called {mode!r}")
    return TracedSession(dict(line["settings"]), layers, int(line.get("num_host_pages", 0)), mode)


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no measurement")
    return float(value)
