"""`cbatch plan` as a person runs it: what it prints, its exit codes, and its mistakes in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.clikit import run_here
from tests.tiny_models import build_tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """A function that runs the program in this process, in a folder of its own; returns exit code and streams."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "the and in", "topic": "a", "max_tokens": 4},
        {"prompt": "the and on", "topic": "a"},
        {"prompt": 1},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return partial(run_here, monkeypatch, capsys)


def test_the_tables_say_what_a_job_will_be(run: Run, model: str) -> None:
    code, out, _ = run("plan", "in.jsonl", "--model", model, "--num-blocks", "50", "--page-size", "4")
    assert code == 1  # a row will fail
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "that can run 2 of 3" in lines
    assert "that fail: bad_prompt 1" in lines
    assert any(line.startswith("row 2: bad_prompt: in.jsonl:3: prompt must be a string") for line in lines)
    assert any(re.fullmatch(r"shareable at most \d tokens, \d+\.\d% of the prompts", line) for line in lines)
    assert any(line.startswith("cache") and "200 tokens in pages of 4" in line for line in lines)
    assert any("--calibration FILE" in line for line in lines)
    assert "Settings" not in lines


def test_verbose_shows_every_setting_with_its_reason(run: Run, model: str) -> None:
    _, out, _ = run("plan", "in.jsonl", "--model", model, "--num-blocks", "50", "-v")
    assert any(line.split()[:3] == ["num_blocks", "50", "(given)"] for line in out.splitlines())


def test_json_is_all_there_is_on_standard_output(run: Run, model: str) -> None:
    code, out, _ = run("plan", "in.jsonl", "--model", model, "--num-blocks", "50", "--json", "--error-tolerance", "0.4")
    plan = json.loads(out)
    assert code == 0  # one of three rows may fail
    assert plan["rows"]["rows_error"] == 1
    assert plan["tokens"]["output_at_most"]["max"] == plan["tokens"]["output_at_most"]["total"] - 4
    assert plan["memory"]["fits"]
    assert plan["dry_run"]["prompt_tokens"] == plan["tokens"]["prompt"]["total"]
    assert plan["settings"]["num_blocks"] == {"value": 50, "reason": "given"}
    assert plan["estimate"] is None


def test_a_job_without_a_good_row_has_a_plan_too(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    code, out, _ = run("plan", "bad.jsonl", "--model", model, "--num-blocks", "50")
    assert code == 1
    assert "0 of 1" in out
    (tmp_path / "empty.jsonl").write_text("")
    code, out, _ = run("plan", "empty.jsonl", "--model", model, "--num-blocks", "50")
    assert (code, "0 of 0" in out) == (0, True)


def test_what_does_not_fit_is_said_in_one_line_after_the_tables(run: Run, model: str) -> None:
    code, out, err = run("plan", "in.jsonl", "--model", model, "--num-blocks", "1000000000")
    assert code == 2
    assert "does not fit" in out
    assert err.splitlines()[-1].startswith("cbatch: num_blocks 1000000000 needs")


def test_a_runs_settings_file_serves_and_what_is_only_the_runs_is_left_alone(
    run: Run, model: str, tmp_path: Path
) -> None:
    settings = (
        f'inputs = ["in.jsonl"]\nmodel = "{model}"\noutput = "out.jsonl"\nnum_blocks = 50\nerror_tolerance = 1.0\n'
    )
    (tmp_path / "job.toml").write_text(settings + "[evidence]\n")
    code, out, _ = run("plan", "--config", "job.toml", "--json")
    assert code == 0
    assert json.loads(out)["settings"]["num_blocks"]["value"] == 50
    assert not (tmp_path / "out.jsonl").exists()


def test_a_report_of_a_run_estimates_the_next_one(run: Run, model: str) -> None:
    common = ("in.jsonl", "--model", model, "--num-blocks", "50", "--ignore-eos", "--max-tokens", "5")
    assert run("run", *common, "-o", "out.jsonl", "-q")[0] == 1
    code, out, _ = run("plan", *common, "--calibration", "out.jsonl", "--json")
    assert code == 1
    plan, report = json.loads(out), json.loads(Path("out.jsonl.report.json").read_text())
    # The same work at the same speed.
    assert plan["estimate"]["generate_s"] == pytest.approx(report["generate_s"])
    assert plan["estimate"]["doubts"] == []


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        ((), 2, "no input given (cbatch plan FILE... --model MODEL)"),
        (("in.jsonl",), 2, "no model given (--model"),
        (("gone.jsonl", "--model", "MODEL"), 2, "no such input: gone.jsonl"),
        (("in.jsonl", "--model", "gone/model/here"), 2, "there is no model folder 'gone/model/here'"),
        (
            ("in.jsonl", "--model", "MODEL", "--calibration", "gone.json"),
            1,
            "there is no file gone.json to calibrate by",
        ),
        (("in.jsonl", "--model", "MODEL", "-o", "x.jsonl"), 2, "No such option: -o"),
        (("in.jsonl", "--model", "MODEL", "--template", "{{"), 2, "--template is no Jinja template"),
        (("in.jsonl", "--model", "MODEL", "--max-model-len", "9999"), 2, "the model's context is"),
    ],
)
def test_a_mistake_is_one_line(run: Run, model: str, arguments: tuple[str, ...], expected: int, message: str) -> None:
    code, out, err = run("plan", *(model if word == "MODEL" else word for word in arguments))
    assert (code, out) == (expected, "")
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("cbatch: ")]) == 1
