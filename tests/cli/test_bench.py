"""`cbatch bench` as a person runs it: table, JSON, exit codes, and mistakes in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cbatch.bench.process import RunFailedError
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
    rows = [{"prompt": "the and in", "max_tokens": 4, "temperature": 1.0}, {"prompt": "on"}, {"prompt": 1}]
    rows.append({"prompt": "nothing to do", "max_tokens": 0})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return partial(run_here, monkeypatch, capsys)


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs that take no time: a token every millisecond, static ones fail. Gives the tasks."""
    tasks: list[dict[str, Any]] = []

    def process(contestant: Any, task: dict[str, Any], environment: dict[str, str], *, verbose: bool) -> dict[str, Any]:
        tasks.append(task | contestant.arguments)
        if contestant.name == "static":
            raise RunFailedError("it fell over")
        times = [[0.001 * (i + 1) for i in range(count)] for _, count in task["rows"]]
        outcome = {"token_times": times, "load_s": 2.0, "peak_rss_bytes": 1 << 20, "peak_device_bytes": None}
        return outcome | {"version": "", "settings": {"page_size": 16}, "cached_tokens": 3}

    monkeypatch.setattr("cbatch.bench.contest.run_process", process)
    return tasks


def test_everybody_gets_the_same_rows_and_the_medians_are_shown(
    run: Run, model: str, instant: list[dict[str, Any]]
) -> None:
    code, out, err = run("bench", "in.jsonl", "--model", model, "--modes", "naive,continuous", "--max-tokens", "6")
    assert code == 0
    assert [task["mode"] for task in instant] == ["naive", "continuous", "continuous", "naive", "naive", "continuous"]
    assert all(task["rows"] == instant[0]["rows"] for task in instant)
    assert [count for _, count in instant[0]["rows"]] == [4, 6]
    assert instant[0]["engine"]["max_model_len"] == max(len(ids) + count for ids, count in instant[0]["rows"])
    assert "medians of 3 runs" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["naive", "1666.7", "1666.7-1666.7", "1.00", "0.00", "0.00", "1.0", "2.0", "1"] in lines
    assert "2 rows are left out; the first: in.jsonl:3: prompt must be a string" in err


@pytest.mark.parametrize(("given", "drafts"), [((), False), (("--speculation",), True)])
def test_the_modes_draft_only_where_asked(
    run: Run, model: str, instant: list[dict[str, Any]], given: tuple[str, ...], drafts: bool
) -> None:
    run("bench", "in.jsonl", "--model", model, "--modes", "naive,continuous", "--repeats", "1", *given)
    assert {task["engine"]["speculation"] for task in instant} == {drafts}


def test_a_mode_that_fails_is_a_line_of_the_table_and_exit_code_1(
    run: Run, model: str, instant: list[dict[str, Any]], tmp_path: Path
) -> None:
    arguments = ("--modes", "static,naive", "--repeats", "1", "--goodput-ttft", "0.5", "-o", "out.json", "-q")
    code, out, err = run("bench", "in.jsonl", "--model", model, "--max-tokens", "6", *arguments)
    assert code == 1
    assert "static failed: it fell over" in out.splitlines()
    assert "goodput" in out
    assert err == ""
    table = json.loads((tmp_path / "out.json").read_text())
    assert (table["kind"], table["rows"], table["output_tokens"], table["rows_left_out"]) == ("bench", 2, 10, 2)
    assert table["results"]["static"]["error"] == "it fell over"
    naive = table["results"]["naive"]
    assert naive["median"] == naive["runs"][0]
    assert (naive["median"]["goodput_tokens_per_s"], naive["cached_tokens"]) == (pytest.approx(10 / 0.006), 3)
    assert table["goodput_targets"] == {"ttft_s": 0.5, "itl_s": None}


def test_a_real_run_in_a_process_of_its_own_ends_with_figures(run: Run, model: str) -> None:
    modes = "continuous+chunked"
    code, out, _ = run("bench", "in.jsonl", "--model", model, "--modes", modes, "--repeats", "1", "--max-tokens", "6")
    assert code == 0
    (line,) = (line.split() for line in out.splitlines() if "continuous+chunked" in line)
    assert float(line[1]) > 0
    assert float(line[-1]) > 50  # MiB


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        ((), 2, "no input given (cbatch bench FILE... --model MODEL)"),
        (("in.jsonl", "--model", "MODEL", "--modes", "quick"), 2, "--modes names 'quick', which is none"),
        (("in.jsonl", "--model", "MODEL", "--against", "sglang"), 2, "--against names 'sglang'"),
        (("in.jsonl", "--model", "MODEL", "--repeats", "0"), 2, "--repeats must be a whole number from 1"),
        (("in.jsonl", "--model", "MODEL", "--temperature", "1"), 2, "No such option: --temperature"),
        (("in.jsonl", "--model", "MODEL", "-o", "gone/out.json"), 2, "does not exist"),
        (("in.jsonl", "--model", "MODEL", "-o", "in.jsonl"), 2, "the input in.jsonl would be overwritten"),
        (("bad.jsonl", "--model", "MODEL"), 1, "none of 1 rows can run; the first: bad.jsonl:1"),
        (("empty.jsonl", "--model", "MODEL"), 1, "no rows to run"),
        (("in.jsonl", "--model", "MODEL", "--page-size", "0"), 2, "--page-size must be"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, model: str, arguments: tuple[str, ...], expected: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "empty.jsonl").write_text("")
    code, out, err = run("bench", *(model if word == "MODEL" else word for word in arguments))
    assert (code, out) == (expected, "")
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("cbatch: ")]) == 1
