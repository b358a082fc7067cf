"""Spec J1, J2: whatever instant a run is killed at, the next one finishes it: nothing lost, doubled or done again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
IN_MEMORY = Path("/dev/shm")  # syncing hundreds of trials to a disk would only wait for the disk
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler and LD_PRELOAD")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("faults") / "file_faults.so"
    source = Path(__file__).with_name("file_faults.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as path:
        yield Path(path)


def trials(faults: Path, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"LD_PRELOAD": str(faults), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.jobs.crash_harness", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert outcomes
    return outcomes


@pytest.mark.parametrize(("mode", "suffix"), [("operations", ".jsonl"), ("torn", ".jsonl"), ("operations", ".parquet")])
def test_a_kill_at_every_file_operation(faults: Path, folder: Path, mode: str, suffix: str) -> None:
    outcomes = trials(faults, folder, mode, suffix)
    assert [outcome for outcome in outcomes if outcome["wrong"]] == []
    assert len(outcomes) > 25
    # How many rows are written at once varies with the threads' luck, and the last operations with it.
    assert sum(outcome["killed"] for outcome in outcomes) > len(outcomes) * 0.7


def test_kills_at_random_instants(faults: Path, folder: Path) -> None:
    outcomes = trials(faults, folder, "random", ".jsonl", "100")
    assert [outcome for outcome in outcomes if outcome["wrong"]] == []
    assert sum(outcome["killed"] for outcome in outcomes) > 50


def test_a_disk_that_fills_up_anywhere(faults: Path, folder: Path) -> None:
    outcomes = trials(faults, folder, "full", ".jsonl")
    assert [outcome for outcome in outcomes if outcome["wrong"]] == []
