"""What the README shows is what happens: its commands and its Python run as they stand, on the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cbatch
from cbatch.io.columns import OPTIONAL_COLUMNS, RESULT_COLUMNS
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 600


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    (found,) = (text for text in blocks if containing in text)
    return str(found)


def test_the_first_thing_is_the_two_commands() -> None:
    first = README.split("```")[1]
    assert [line.split("#")[0].split() for line in first.splitlines()[1:]] == [["make", "demo"], ["make", "test"]]


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "sample_jobs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_column_of_the_output_is_named() -> None:
    without = {"completions", "preemptions", "attempt", *OPTIONAL_COLUMNS}  # in the reference only
    assert all(f"`{column.name}`" in README for column in RESULT_COLUMNS if column.name not in without)


def test_the_python_names_are_there_and_load_no_torch() -> None:
    code = f"import sys, cbatch; [getattr(cbatch, n) for n in {sorted(set(cbatch.__all__) - {'Engine'})!r}]"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'engines'"):
        _ = cbatch.engines


@pytest.mark.real_model
def test_the_python_example_runs(real_model: Path) -> None:
    code = block("python", "Engine.load").replace(".models/smollm2", str(real_model))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ")} == {"0", "1"}


@pytest.mark.real_model
def test_the_quick_start_runs(real_model: Path, tmp_path: Path) -> None:
    script = block("sh", "cat >").split("\n", 1)[1]  # without the installation
    script = re.sub(r"--model \S+", f"--model {real_model}", script).replace(
        "cbatch run", f"{sys.executable} -m cbatch run"
    )
    done = subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert rows[1]["completion_tokens"] <= 40
    assert (tmp_path / "answers.jsonl.report.json").exists()
