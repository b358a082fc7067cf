"""The Slurm script and the cron line of the sample jobs, run as they stand: Slurm and the model are stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

STUB = ROOT / "tests" / "stub_engine.py"
SLURM_JOB = ROOT / "sample_jobs" / "slurm" / "array.sbatch"
NIGHTLY = ROOT / "sample_jobs" / "nightly"
TIMEOUT_S = 120


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the programs that the scripts call: cbatch with the stub engine, and a Slurm that only hands on."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs, "cbatch", f'exec "{sys.executable}" "{STUB}" "$@"')
    program(programs, "srun", 'exec "$@"')
    program(programs, "scontrol", f'echo "$@" >>"{tmp_path}/scontrol.log"')
    return tmp_path


def run(command: list[str], home: Path, cwd: Path, **names: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HOME": str(home)} | names
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def make_rows(path: Path, texts: list[str], column: str) -> None:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_task(home: Path, index: int, count: int) -> subprocess.CompletedProcess[str]:
    """One task of a job array, its numbers counted from 10 in steps of 2 as arrays may be."""
    array = {"ID": 10 + 2 * index, "MIN": 10, "MAX": 10 + 2 * (count - 1), "STEP": 2, "COUNT": count}
    names = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in array.items()}
    names |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_JOB_ID": str(78 + index)}
    names |= {"INPUT": "in.jsonl", "MODEL": "model", "OUTPUT": "out.jsonl"}
    return run(["bash", str(SLURM_JOB)], home, home, **names)


def make_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_the_tasks_of_an_array_make_one_output(home: Path) -> None:
    make_model(home / "model")
    make_rows(home / "in.jsonl", [f"row {i}" for i in range(7)], "prompt")
    for index in range(3):
        done = run_task(home, index, 3)
        assert done.returncode == 0, done.stderr
        assert f"part {index} of 3" in done.stderr
    assert run(["cbatch", "merge", "out.jsonl"], home, home).returncode == 0
    rows = read_rows(home / "out.jsonl")
    assert [row["row"] for row in rows] == list(range(7))
    assert [row["prompt"] for row in rows] == [f"row {i}" for i in range(7)]
    assert not (home / "scontrol.log").exists()


@pytest.mark.parametrize(("code", "requeued"), [(75, "requeue 77_12\n"), (1, None)])
def test_a_task_that_stopped_in_order_is_queued_again(home: Path, code: int, requeued: str | None) -> None:
    program(home / "bin", "cbatch", f"exit {code}")
    assert run_task(home, 1, 3).returncode == code
    log = home / "scontrol.log"
    assert (log.read_text() if log.exists() else None) == requeued


def test_the_cron_line_runs_only_what_is_new(home: Path) -> None:
    line = re.search(r"^15 2 \* \* \* (.*)$", (NIGHTLY / "crontab").read_text(), flags=re.MULTILINE)
    assert line is not None
    assert "%" not in line[1]  # cron would end the command there
    folder = home / "tickets"
    make_model(folder / "models" / "smollm2")
    (folder / "labels.toml").write_bytes((NIGHTLY / "labels.toml").read_bytes())
    (folder / "incoming").mkdir()
    make_rows(folder / "incoming" / "1.jsonl", ["where is it", "it is broken"], "text")
    started = home / "started.log"
    assert run(["sh", "-c", line[1]], home, home, STUB_LOG=str(started)).returncode == 0
    assert len(started.read_text().splitlines()) == 2
    make_rows(folder / "incoming" / "2.jsonl", ["send it back"], "text")
    assert run(["sh", "-c", line[1]], home, home, STUB_LOG=str(started)).returncode == 0
    assert len(started.read_text().splitlines()) == 3
    rows = read_rows(folder / "labels.jsonl")
    assert [row["text"] for row in rows] == ["where is it", "it is broken", "send it back"]
    log = (folder / "labels.log").read_text().splitlines()
    assert all(entry.startswith("cbatch: ") for entry in log)
    assert sum(" ok, 0 failed" in entry for entry in log) == 2
