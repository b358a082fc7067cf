"""One run in a process of its own: the task goes in as JSON, the outcome comes out, whatever happens in between.

Each run has its memory to itself, and a crash ends that run alone. Called by `contest`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from cbatch.bench.contestants import Contestant

SHOWN = 200  # characters


class RunFailedError(Exception):
    """A run that ended without figures; the message is its last word."""


def run_process(
    contestant: Contestant, task: Mapping[str, Any], environment: Mapping[str, str], *, verbose: bool = False
) -> dict[str, Any]:
    """Run one task to its end and give the outcome; `environment` counts where nothing else is set.

    Raises RunFailedError.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            contestant.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else log,
            env={**environment, **contestant.environment, **os.environ},
            start_new_session=True,  # so that it ends with all that it started
        )
        try:
            outcome = _exchange(process, {**task, **contestant.arguments})
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if not outcome:
            raise RunFailedError(_last_line(log) or f"its process ended without a word, {_describe(code)}")
    try:
        found: dict[str, Any] = json.loads(outcome)
    except ValueError:
        raise RunFailedError(f"its answer is not JSON: {outcome.decode(errors='replace').strip()[:SHOWN]}") from None
    if "error" in found:
        raise RunFailedError(found["error"])
    return found


def _exchange(process: subprocess.Popen[bytes], task: Mapping[str, Any]) -> bytes:
    """Send the task and wait for the answer; standard input stays open, as its end would end the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended early, and its log says why
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
    return process.stdout.readline()  # not to the end: what the process started may hold the pipe


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def check_tokens(token_times: Sequence[Sequence[float]], rows: Sequence[tuple[list[int], int]]) -> None:
    """Raise RunFailedError unless every row has as many tokens as it was to have: else it did other work."""
    if len(token_times) != len(rows):
        raise RunFailedError(f"it answered {len(token_times)} of {len(rows)} rows")
    for i, (times, (_, count)) in enumerate(zip(token_times, rows, strict=True)):
        if len(times) != count:
            raise RunFailedError(f"row {i} has {len(times)} tokens in place of {count}")
