"""Spec J1 with the real engine: killed at five instants, resumed to the end, the same bytes as if undisturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.jobs.jobkit import read_rows, without_times
from tests.tiny_models import build_tiny

ROOT = Path(__file__).parent.parent.parent
NUM_ROWS = 120
KILLED_AT = (1, 15, 40, 70, 100)  # finished rows
ENDS_S = 240.0


def start(folder: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cbatch", "run", str(folder / "in.jsonl"), "-o", str(output)]
    command += ["--model", str(folder / "model"), "--dtype", "float32", "--max-requests-per-batch", "4", "-q"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def keys(journal: Path) -> Counter[str]:
    """How often each row has a whole entry."""
    found: Counter[str] = Counter()
    for line in journal.read_bytes().split(b"\n")[:-1] if journal.exists() else ():
        value = json.loads(line)
        if "key" in value:
            found[value["key"]] += 1
    return found


def test_five_kills_of_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    build_tiny("llama", tmp_path / "model")
    rows = [{"prompt": f"Row {n % 50}: once upon", "max_tokens": 24, "temperature": n % 2} for n in range(NUM_ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert start(tmp_path, whole).wait(ENDS_S) == 0
    journal = tmp_path / "killed.jsonl.journal.jsonl"
    for num_finished in KILLED_AT:
        process = start(tmp_path, killed)
        deadline = time.monotonic() + ENDS_S
        while not journal.exists() or journal.read_bytes().count(b'"result"') < num_finished:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not killed.exists()
    assert start(tmp_path, killed).wait(ENDS_S) == 0
    assert set(keys(journal).values()) == {1}, "a finished row ran again"
    assert without_times(read_rows(killed)) == without_times(read_rows(whole))
    assert len(read_rows(killed)) == NUM_ROWS
