"""Spec I6: `-o -`, results on standard output and all else on standard error; who stops reading loses nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.clikit import STUB, TIMEOUT_S, read_rows, run_stub, shell, write_input

JOB = ["run", "in.jsonl", "--model", "model", "-o", "-"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path, *({"id": number, "prompt": f"row {number}"} for number in range(2000)))
    (tmp_path / "kept").mkdir()
    return tmp_path


def test_the_results_and_nothing_else_are_on_standard_output(folder: Path) -> None:
    done = run_stub(*JOB, "--checkpoint-dir", "kept", cwd=folder)
    assert done.returncode == 0
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == list(range(2000))
    assert all(line.startswith("cbatch: ") for line in done.stderr.splitlines())
    assert (folder / "kept" / "stdout.jsonl").read_text(encoding="utf-8") == done.stdout
    again = run_stub(*JOB, "--checkpoint-dir", "kept", cwd=folder)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "nothing was done" in again.stderr


def test_a_place_for_the_journal_is_asked_for(folder: Path) -> None:
    done = run_stub(*JOB, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--checkpoint-dir FOLDER" in done.stderr
    assert done.stderr.count("\n") == 1
    gone = run_stub(*JOB, "--checkpoint-dir", "gone", cwd=folder)
    assert gone.returncode == 2
    assert "the folder of --checkpoint-dir, gone does not exist (mkdir -p gone)" in gone.stderr
    part = run_stub(*JOB, "--checkpoint-dir", "kept", "--shard", "0/2", cwd=folder)
    assert (part.returncode, part.stdout) == (2, "")
    assert "for cbatch merge" in part.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_ends_it_quietly_and_the_file_is_whole(folder: Path, unbuffered: str) -> None:
    script = '{ "$@" ' + " ".join(JOB) + " -q --checkpoint-dir kept; echo $? >code; } | head -n 1"
    done = shell(script, folder, PYTHONUNBUFFERED=unbuffered)
    assert json.loads(done.stdout)["id"] == 0
    assert done.stderr == ""
    assert (folder / "code").read_text() == "141\n"
    assert len(read_rows(folder / "kept" / "stdout.jsonl")) == 2000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(folder: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*STUB, *JOB, "-q", "--checkpoint-dir", "kept"]
        done = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
        help_text = [*STUB, "run", "--help"]
        helped = subprocess.run(help_text, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert done.returncode == helped.returncode == 1
    assert "cannot write standard output: No space left on device (the results are in kept/stdout.jsonl)" in done.stderr
    assert "No space left on device" in helped.stderr
    assert done.stderr.count("\n") == helped.stderr.count("\n") == 1
    assert len(read_rows(folder / "kept" / "stdout.jsonl")) == 2000


def test_a_failing_row_decides_over_the_exit_code_there_as_well(tmp_path: Path) -> None:
    write_input(tmp_path, {"prompt": "hello"}, "broken")
    done = run_stub(*JOB, "--checkpoint-dir", ".", "-q", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 2
    assert len(read_rows(tmp_path / "stdout.jsonl")) == 2
