"""`cbatch diagnose` as a program: a run, a TOML file, a vllm command line, and mistakes in one line each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.clikit import run_job, run_stub, write_input
from tests.diagnose.runs import finished_run
from tests.diagnose.test_planted import PLANTED
from tests.simulate.traces import stop_the_clock

SMALL = '{"prompt_tokens": 40, "max_tokens": 30}\n'


def test_a_run_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dict(PLANTED["request limit"])
    finished_run(tmp_path, stop_the_clock(monkeypatch), settings.pop("works"), **settings)
    done = run_stub("diagnose", "out.jsonl", "-o", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, evidence, advice = done.stdout.splitlines()[:3]
    assert first.startswith("1. request limit: ")
    assert "less time" in first
    assert "while others waited" in evidence
    assert advice.startswith("   set: --max-requests-per-batch ")
    assert json.loads((tmp_path / "found.json").read_text())["findings"][0]["cause"] == "request limit"


def test_a_run_about_vllm_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my vllm runs"
    folder.mkdir()
    output = finished_run(folder, stop_the_clock(monkeypatch), [(10, 0, 5)] * 20)
    output.write_text("exec vllm serve m\n")
    done = run_stub("diagnose", str(output), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "looked at the report and the trace of" in done.stderr


def test_what_was_not_seen_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path, stop_the_clock(monkeypatch), [(10, 0, 5)] * 20, trace=False, report={"series": {}})
    done = run_stub("diagnose", "out.jsonl", cwd=tmp_path)
    assert done.stdout.startswith("nothing was found in what was seen; it was not seen how it was batched")


def test_a_run_without_a_trace_says_what_is_missing(tmp_path: Path) -> None:
    write_input(tmp_path, *({"prompt": f"p{n}"} for n in range(30)))
    assert run_job(tmp_path).returncode == 0
    done = run_stub("diagnose", "out.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "does not say what page_size was" in done.stderr, "the stub's report does not"


def test_a_toml_file_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "lengths.jsonl").write_text(SMALL * 60)
    settings = 'max_requests_per_batch = 2\ntemplate = "{{x}}"\nprompt_column = "y"\n'
    (tmp_path / "job.toml").write_text(settings)
    done = run_stub("diagnose", "job.toml", "--lengths", "lengths.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1. request limit")
    assert "incompatible: --template with --prompt-column" in done.stdout
    assert "what steps cost is that of the preset" in done.stderr


@pytest.mark.parametrize("in_file", [False, True])
def test_a_vllm_command_line_is_looked_at(tmp_path: Path, in_file: bool) -> None:
    (tmp_path / "lengths.jsonl").write_text(SMALL * 60)
    text = """vllm serve m --max-num-seqs 4 -pp 2 --speculative-config '{"method": "ngram"}'"""
    (tmp_path / "serve.sh").write_text("#!/bin/sh\n" + text + "\n")
    done = run_stub("diagnose", "serve.sh" if in_file else text, "--lengths", "lengths.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1. request limit")
    assert "--speculative-config with --pipeline-parallel-size (up to 0.15.0)" in done.stdout
    newer = run_stub("diagnose", text, "--lengths", "lengths.jsonl", "--vllm-version", "0.16.0", "-q", cwd=tmp_path)
    assert (newer.returncode, newer.stderr) == (0, "")
    assert "incompatible" not in newer.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.jsonl",), "there is no report of nowhere.jsonl"),
        (("nowhere.toml",), "nowhere.toml"),
        (("bad.toml",), "bad.toml gives nonsense, which is no setting"),
        (("nowhere.jsonl", "--calibration", "x"), "--calibration is for configurations"),
        (("vllm serve m", "--calibration", "x.json"), "cannot read x.json"),
        (("vllm serve m", "--calibration", "x.json", "--preset", "h100-70b-fp8"), "both say what steps cost"),
        (("vllm serve m", "--vllm-version", "newest"), "no version of vLLM"),
        (("vllm serve m", "--lengths", "x.jsonl"), "x.jsonl"),
        ((), "TARGET"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "bad.toml").write_text("nonsense = 1\n")
    done = run_stub("diagnose", *arguments, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "command",
    [
        ("report", "out.jsonl", "-o"),
        ("diagnose", "out.jsonl", "-o"),
        ("simulate", "--fit", "out.jsonl", "-o"),
        ("simulate", "--fit", "out.jsonl", "--save-calibration"),
    ],
)
def test_no_file_of_a_run_is_written_over(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    done = run_stub("run", "in.jsonl", "--model", "m", "-o", "out.jsonl", "--trace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for suffix in ("", ".report.json", ".journal.jsonl", ".trace.jsonl.gz"):
        file = tmp_path / f"out.jsonl{suffix}"
        before = file.read_bytes()
        done = run_stub(*command, file.name, cwd=tmp_path)
        assert done.returncode == 2
        assert "would be overwritten" in done.stderr
        assert file.read_bytes() == before


def cut(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[: len(lines) // 2]


def without_layers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"session": 1}, *lines[1:]]


def with_words(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*lines[:-1], lines[-1] | {"at_s": "x"}]


def without_end(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*lines[:-1], lines[-1] | {"at_s": float("inf")}]


@pytest.mark.parametrize("damage", [cut, without_layers, with_words, without_end])
def test_a_damaged_trace_is_told_and_nothing_is_fitted_to_it(
    damage: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 20)
    done = run_stub("run", "in.jsonl", "--model", "m", "-o", "out.jsonl", "--trace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = tmp_path / "out.jsonl.trace.jsonl.gz"
    lines = damage([json.loads(line) for line in gzip.decompress(trace.read_bytes()).splitlines()])
    trace.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    done = run_stub("simulate", "--fit", "out.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is damaged" in done.stderr or "that is not JSON" in done.stderr
