"""Runs one job over and over in forked children that are killed, and checks what the survivors find.

Started by `test_crashes` with `file_faults.c` preloaded: `python -m tests.jobs.crash_harness DIRECTORY MODE`. Imports
are paid once and every trial is a fork, so that hundreds of crashes take seconds. Prints one JSON object per trial.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401 - once, before the forks
import psutil  # noqa: F401
import pyarrow.parquet as pq  # noqa: F401

from tests.jobs.jobkit import Bench, prompts, without_times

FAULTS = ctypes.CDLL(None)
FAULTS.faults_arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_long)
FAULTS.faults_count.restype = ctypes.c_long
NO_LIMIT = -1
STEP_S = 0.002  # the rows are then written one by one
EXIT_COUNT = "operations"

ROWS: list[Any] = [
    *prompts(5, temperature=1.0),
    {"prompt": "same", "temperature": 1.0},
    "torn {",
    {"prompt": "same", "temperature": 1.0},
    {"prompt": "漢字 \u2028 👍", "max_tokens": 30, "ignore_eos": True},
    {"prompt": ""},
    *prompts(3),
]


class Trials:
    """A job's directory, started over for each trial."""

    def __init__(self, path: Path, suffix: str) -> None:
        self.path = path
        self.suffix = suffix
        self.undisturbed = self._outcome_of_a_whole_run()

    def fresh(self) -> Bench:
        folder = self.path / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        bench = Bench(folder)
        bench.write(ROWS)
        bench.output = folder / f"out{self.suffix}"
        return bench

    def child(
        self, bench: Bench, *, kill_at: int = 0, torn: bool = False, room: int = NO_LIMIT, step_s: float = 0
    ) -> int:
        """Fork a run of the job and return its process id; its exit code is the job's."""
        process = os.fork()
        if process:
            return process
        code = 99
        try:
            bench.engine_options = {"step_s": step_s}
            FAULTS.faults_arm(str(bench.path).encode(), kill_at, torn, room)
            code = bench.run().exit_code
            (bench.path / EXIT_COUNT).write_text(str(FAULTS.faults_count()))
        except Exception as error:
            code = getattr(error, "exit_code", 98)
            (self.path / "error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)

    def finish(self, bench: Bench) -> dict[str, Any]:
        """Run the job to its end and compare with an undisturbed run. Returns what is wrong, {} if nothing."""
        finished = journalled_keys(bench)
        code = wait(self.child(bench))
        if code != 1:
            return {"exit code": code, "error": (self.path / "error").read_text()}
        wrong: dict[str, Any] = {}
        if comparable(bench) != self.undisturbed:
            wrong["rows differ"] = comparable(bench)
        again = {key: count for key, count in journalled_keys(bench).items() if count > 1 and finished[key]}
        if again:
            wrong["finished rows ran again"] = again
        left = sorted(path.name for path in bench.path.iterdir() if path.name.endswith((".partial", ".lock")))
        if left:
            wrong["left behind"] = left
        return wrong

    def _outcome_of_a_whole_run(self) -> list[dict[str, Any]]:
        bench = self.fresh()
        assert wait(self.child(bench, step_s=STEP_S)) == 1, (self.path / "error").read_text()
        self.num_operations = int((bench.path / EXIT_COUNT).read_text())
        rows = comparable(bench)
        assert len(rows) == len(ROWS)
        return rows


def comparable(bench: Bench) -> list[dict[str, Any]]:
    return without_times(bench.rows())


def wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def journalled_keys(bench: Bench) -> Counter[str]:
    """How often each row has a whole entry in the journal."""
    keys: Counter[str] = Counter()
    journal = bench.output.with_name(bench.output.name + ".journal.jsonl")
    for line in journal.read_bytes().split(b"\n") if journal.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if "key" in value:
            keys[value["key"]] += 1
    return keys


def at_every_operation(trials: Trials, *, torn: bool) -> None:
    for kill_at in range(1, trials.num_operations + 1):
        bench = trials.fresh()
        killed = wait(trials.child(bench, kill_at=kill_at, torn=torn, step_s=STEP_S)) == -signal.SIGKILL
        report(f"operation {kill_at}", trials.finish(bench), killed=killed)


def at_random_instants(trials: Trials, count: int) -> None:
    rng = random.Random(5)
    for number in range(count):
        bench = trials.fresh()
        kills = 0
        for _ in range(rng.randint(1, 3)):
            process = trials.child(bench, step_s=STEP_S)
            time.sleep(rng.random() * 0.2)
            os.kill(process, signal.SIGKILL)
            kills += wait(process) == -signal.SIGKILL
        report(f"instant {number}", trials.finish(bench), killed=kills > 0)


def on_full_disks(trials: Trials) -> None:
    for room in (0, 1, 100, 300, 1000, 3000, 5000, 7000, 8000, 9000):
        bench = trials.fresh()
        code = wait(trials.child(bench, room=room))
        wrong = {} if code == 1 and not bench.output.exists() else {"exit code": code}
        error = (trials.path / "error").read_text()
        if "No space left on device" not in error:
            wrong["message"] = error
        report(f"room for {room} bytes", wrong | trials.finish(bench), killed=True)


def report(trial: str, wrong: dict[str, Any], *, killed: bool) -> None:
    sys.stdout.write(json.dumps({"trial": trial, "wrong": wrong, "killed": killed}) + "\n")


def main() -> None:
    path, mode, suffix = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    trials = Trials(path, suffix)
    if mode == "random":
        at_random_instants(trials, int(sys.argv[4]))
    elif mode == "full":
        on_full_disks(trials)
    else:
        at_every_operation(trials, torn=mode == "torn")


if __name__ == "__main__":
    main()
