"""The step trace of a job (`run --trace`): what every step did, and when requests changed state, beside the output.

Lines of JSON, compressed. One that has "session" begins a process's part: its plan, and what times count from. Every
other one is a step. Written on a thread of its own; what cannot be written ends the trace, never the job. The
simulator, `diagnose` and `report` read it (`cbatch.simulate.tracefile`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from cbatch.engine.observer import RequestEvent, StepRecord
from cbatch.errors import CbatchError
from cbatch.io import jsonform
from cbatch.io.gziplog import GzipLog
from cbatch.jobs.loop import BatchEngine

FLUSH_INTERVAL_S = 1.0  # what a killed process loses at most
MAX_LINES = 4096  # kept in memory before they are written
MAX_QUEUED = 1024  # steps on their way; then the engine waits
DIGITS = 6  # of times, in seconds


@contextmanager
def tracing(engine: BatchEngine, path: Path, session: int, say: Callable[[str], None]) -> Iterator[None]:
    """Trace what `engine` does inside. Raises OutputError where the trace cannot begin; says where it cannot go on."""
    writer = TraceWriter(path, {"session": session, **describe_session(engine)})
    engine.observe(writer)
    try:
        yield
    finally:
        writer.close()
        if writer.failure is not None:
            say(f"the trace is not complete: {writer.failure}")


def describe_session(engine: BatchEngine) -> dict[str, Any]:
    """Return what a step's figures mean: when they count from, how requests were batched, the plan, and the layers."""
    windows = sorted(engine.plan.layer_windows, key=lambda window: window or 0)
    return {
        "started_at": jsonform.format_utc(time.time()),
        "mode": engine.plan.mode,
        "settings": {name: setting["value"] for name, setting in engine.plan.settings().items()},
        "num_host_pages": engine.plan.num_host_pages,
        "layers": [[window, len(list(layers))] for window, layers in groupby(windows)],  # by attention window
    }


class TraceWriter:
    """Watches an engine and writes down what it sees."""

    def __init__(self, path: Path, session: dict[str, Any]) -> None:
        """Begin or go on with the trace at `path`; `session` is told ahead of the steps. Raises OutputError."""
        self._log = GzipLog(path)
        self._began: float | None = None  # monotonic seconds
        self._lines = [jsonform.dump_line(session)]
        self._flushed_at = time.monotonic()
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(MAX_QUEUED)
        self.failure: CbatchError | None = None
        self._thread = threading.Thread(target=self._run, name="cbatch-trace", daemon=True)
        self._thread.start()

    def on_step(self, record: StepRecord) -> None:
        """Take a step to write down later."""
        self._queue.put(record)

    def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join()
        self._log.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            try:
                record = self._queue.get(timeout=FLUSH_INTERVAL_S)
                closing = record is None
                if record is not None and self.failure is None:
                    self._began = record.times.began if self._began is None else self._began
                    self._lines.append(jsonform.dump_line(step_as_dict(record, self._began)))
            except queue.Empty:
                pass
            is_due = time.monotonic() - self._flushed_at >= FLUSH_INTERVAL_S or len(self._lines) >= MAX_LINES
            if self._lines and (is_due or closing):
                self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        lines, self._lines = self._lines, []
        try:
            if self.failure is None:
                self._log.append(lines)
        except CbatchError as error:
            self.failure = error


def step_as_dict(record: StepRecord, began: float) -> dict[str, Any]:
    """Return a step as a trace has it, times counted from `began`."""
    times, load = record.times, record.load
    return {
        "at_s": round(times.began - began, DIGITS),
        "schedule_s": round(times.scheduled - times.began, DIGITS),
        "run_s": round(times.ran - times.scheduled, DIGITS),
        "update_s": round(times.ended - times.ran, DIGITS),
        "requests": record.num_requests,
        "prefill_tokens": record.prefill_tokens,
        "decode_tokens": record.decode_tokens,
        "kv_tokens_read": round(record.kv_tokens_read),
        "pairs": record.num_pairs,
        "running": record.num_running,
        "waiting": record.num_waiting,
        "owned_blocks": round(load.owned_blocks, 2),
        "cached_blocks": round(load.cached_blocks, 2),
        "free_blocks": round(load.free_blocks, 2),
        "kv_waste": None if load.waste is None else round(load.waste, DIGITS),
        "offloads": record.num_offloads,
        "restores": record.num_restores,
        "soft_resets": record.num_soft_resets,
        "events": [_event_as_list(event, began) for event in record.events],
    }


def _event_as_list(event: RequestEvent, began: float) -> list[Any]:
    return [
        event.request_id,
        event.sample,
        event.state.value,
        round(event.at - began, DIGITS),
        event.num_prompt_tokens,
        event.num_generated,
        event.cached_tokens,
    ]
