"""`cbatch simulate` as a program: figures on standard output, everything else on standard error, mistakes in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.clikit import run_stub

SMALL = ("--rows", "40", "--prompt-tokens", "20-60", "--output-tokens", "5-20")


def test_the_four_modes_are_compared(tmp_path: Path) -> None:
    done = run_stub("simulate", *SMALL, "--goodput-itl", "1", "-o", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert [row.split("  ")[0] for row in rows] == [
        "static, no pages", "naive", "static", "continuous", "continuous+chunked"
    ]  # fmt: skip
    assert all(word in header for word in ("tokens/s", "TTFT mean", "TTFT P99", "ITL P99", "goodput"))
    assert "the preset h100-70b-fp8" in done.stderr
    table = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in table["cases"]] == [row.split("  ")[0] for row in rows]
    assert all(case["requests"] == 40 and case["goodput_tokens_per_s"] > 0 for case in table["cases"])


def test_a_job_is_planned_over_several_gpus(tmp_path: Path) -> None:
    done = run_stub("simulate", *SMALL, "--modes", "continuous+chunked", "--gpus", "4", "-q", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("4 GPUs: ")
    assert "GPU-hours" in done.stdout


def test_settings_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('model = "m"\nmax_requests_per_batch = 1\n')
    done = run_stub("simulate", *SMALL, "--modes", "continuous", "--config", "job.toml", "-o", "o.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "o.json").read_text())
    assert table["engine"]["max_requests_per_batch"] == 1
    assert table["cases"][-1]["mean_running"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rows", "0"), "--rows must be a whole number from 1"),
        (("--prompt-tokens", "some"), "no distribution of lengths"),
        (("--preset", "x"), "there is no preset x"),
        (("--fit", "x.jsonl"), "no trace of x.jsonl"),
        (("--lengths", "x.jsonl"), "x.jsonl"),
        (("--modes", "quick"), "--modes names 'quick', which is none"),
        (("--gpus", "0"), "--gpus must be"),
        (("--arrivals", "-1"), "--arrivals must be"),
        (("--scheduler-type", "lifo"), "--scheduler-type must be one of"),
        (("--num-blocks", "1", "--rows", "2"), "holds no request"),
        (("-o", "no/such/folder.json", "--rows", "1", "--modes", "naive"), "no/such does not exist (mkdir -p "),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run_stub("simulate", "-q", *arguments, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
