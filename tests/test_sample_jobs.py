"""Every sample job runs as its README says, on the real model, and shares what it says is shared."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

JOBS = {path.parent.name: path.parent for path in sorted((ROOT / "sample_jobs").glob("*/prompts.jsonl"))}
LIMIT = 6
SHARED = {"ticket_labels": 0.7, "passage_qa": 0.5, "dataset_generation": 0.6}  # of the prompt tokens, in so few rows
TIMEOUT_S = 900


def documented_command(folder: Path) -> list[str]:
    """The `cbatch run` of a job's README, word by word."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    block = text.split("```sh\n")[1].split("```")[0]
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:2] == ["cbatch", "run"]
    return words[1:]


def run_documented(folder: Path, model: Path, output: Path) -> list[dict[str, Any]]:
    words = documented_command(folder)
    words[words.index("--model") + 1] = str(model)
    words[words.index("-o") + 1] = str(output)
    command = [sys.executable, "-m", "cbatch", *words, "--limit", str(LIMIT), "--dtype", "float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return read_rows(output)


@pytest.fixture(scope="module")
def outputs(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of every job, run once."""
    folder = tmp_path_factory.mktemp("sample_jobs")
    for name, job in JOBS.items():
        run_documented(job, real_model, folder / f"{name}.jsonl")
    return {name: folder / f"{name}.jsonl" for name in JOBS}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_there_are_the_three_jobs() -> None:
    assert set(JOBS) == set(SHARED)


@pytest.mark.real_model
@pytest.mark.parametrize("name", JOBS)
def test_a_sample_job_runs_as_documented(name: str, outputs: dict[str, Path]) -> None:
    rows, inputs = read_rows(outputs[name]), read_rows(JOBS[name] / "prompts.jsonl")
    assert len(rows) == LIMIT < len(inputs)
    for index, (row, given) in enumerate(zip(rows, inputs, strict=False)):
        assert row["row"] == index
        assert row | given == row
        assert row["error"] is None
        assert row["finish_reason"] in ("stop", "length")
        assert row["completion_tokens"] >= 1
    assert sum(bool(row["completion"].strip()) for row in rows) >= LIMIT - 1
    report = json.loads(outputs[name].with_name(f"{name}.jsonl.report.json").read_text())
    assert report["cached_tokens"] >= SHARED[name] * report["prompt_tokens"]
    assert report["rows_ok"] == LIMIT


@pytest.mark.real_model
def test_seeds_make_a_data_set_repeatable(real_model: Path, outputs: dict[str, Path], tmp_path: Path) -> None:
    once = read_rows(outputs["dataset_generation"])
    again = run_documented(JOBS["dataset_generation"], real_model, tmp_path / "again.jsonl")
    assert [row["completion"] for row in once] == [row["completion"] for row in again]
    assert len({row["completion"] for row in once}) > 1


@pytest.mark.real_model
def test_a_complete_model_is_not_fetched_again(real_model: Path) -> None:
    before = (real_model / "model.safetensors").stat().st_mtime_ns
    fetch = [sys.executable, str(ROOT / "sample_jobs" / "fetch_model.py"), str(real_model)]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout.strip()) == (0, str(real_model))
    assert (real_model / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    fetch = [sys.executable, str(ROOT / "sample_jobs" / "fetch_model.py"), str(tmp_path)]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "holds no complete model" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.real_model
def test_the_demo_shows_the_completions(outputs: dict[str, Path]) -> None:
    show = [sys.executable, str(ROOT / "sample_jobs" / "show.py"), str(outputs["ticket_labels"]), "text", "expected"]
    done = subprocess.run(show, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "completion" in done.stdout
    assert "stairwell" in done.stdout
    assert "prompt tokens were shared" in done.stdout
