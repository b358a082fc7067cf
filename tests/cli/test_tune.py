"""`cbatch tune` on the command line: what it takes, what it says, how it ends, and that `run` takes what it writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing

from cbatch.cli.app import app
from cbatch.cli.options import BY_NAME
from cbatch.cli.setting import ConsoleConfig
from cbatch.cli.tune import TuneOptions, read_tune_options
from cbatch.cli.tune_options import SETTINGS, TUNE_SETTINGS
from cbatch.config import EngineConfig
from tests.cli.clikit import STUB, TIMEOUT_S, run_here, run_on_terminal, run_stub, write_input
from tests.tune.stub_engines import BEST
from tests.tune.tunekit import rows

Ending = Callable[..., tuple[int, str, str]]
JOURNAL = "tuned.toml.journal.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path, *rows())
    return tmp_path


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ending:
    """A function that runs the program in this process, in a folder, and returns exit code and streams."""

    def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        return run_here(monkeypatch, capsys, *arguments)

    return run


def tune(folder: Path, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_stub("tune", "in.jsonl", "--model", "model", *more, cwd=folder, **options)


def parse(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> TuneOptions:
    """Let the real parser read a command line, and stop before the search."""
    read: list[TuneOptions] = []

    def keep(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
        read.append(read_tune_options(inputs, config, given))
        return 0

    monkeypatch.setattr("cbatch.cli.app.tune_command", keep)
    typer.main.get_command(app).main(["tune", "in.jsonl", "--model", "m", *arguments], standalone_mode=False)
    return read[0]


def test_help_lists_every_setting_and_nothing_else() -> None:
    text = typer.testing.CliRunner().invoke(app, ["tune", "--help"]).stdout
    listed = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - {"--trials", "--config"}
    flags = {s.option for s in SETTINGS if s.kind == "flag" and s.target is not ConsoleConfig}
    options = {setting.option for setting in SETTINGS} - {"--trials"}
    assert listed == {*options, *(f"--no-{flag[2:]}" for flag in flags), "--help"}
    assert text.isascii()


def test_every_engine_setting_of_run_can_be_held_fixed() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    assert {s.name for s in BY_NAME.values() if s.target is EngineConfig} <= set(names)


def test_what_is_given_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parse(
        *("--trials", "7", "--budget", "90s", "--search", "scheduler_type", "--search", "page_size", "-o", "x.toml"),
        *("--block-size", "8", "--temperature", "0.5", "--template", "{{a}}", "--seed", "4", "--restart", "-q"),
        monkeypatch=monkeypatch,
    )
    assert (found.tune.trials, found.tune.budget, found.tune.output) == (7, "90s", "x.toml")
    assert found.tune.search == ("scheduler_type", "page_size")
    assert (found.engine.page_size, found.job.template, found.job.seed, found.job.restart) == (8, "{{a}}", 4, True)
    assert found.job.sampling == {"temperature": 0.5}
    assert found.console.quiet
    assert found.given == {"model": "m", "page_size": 8, "temperature": 0.5, "template": "{{a}}", "seed": 4}


def test_a_configuration_of_run_is_kept_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its output is where `run` writes, and not where the search does."""
    file = tmp_path / "job.toml"
    file.write_text(
        'inputs = ["a.jsonl"]\nmodel = "other"\noutput = "answers.jsonl"\norder = "completion"\nmax_num_seqs = 5\n'
    )
    found = parse("--config", str(file), "--max-tokens", "9", monkeypatch=monkeypatch)
    assert found.tune.output == "tuned.toml"
    assert found.job.inputs == ("in.jsonl",)
    assert found.given == {
        "inputs": ("in.jsonl",),
        "model": "m",
        "output": "answers.jsonl",
        "order": "completion",
        "max_requests_per_batch": 5,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "0"], "--trials must be a whole number from 1 to 2147483647: it is 0"),
        (["--trials", "many"], "--trials must be a whole number"),
        (["--budget", "10"], "--budget must be a duration like 90s, 10m or 1h30m: it is '10'"),
        (["--budget", "10 minutes"], "it is '10 minutes'"),
        (["--budget", "0s"], "it is '0s'"),
        (["--search", "num_blocks"], "--search must be one of page_size, max_batch_tokens"),
        (["--page-size", "8", "--max-batch-tokens", "64"], "nothing is left to search"),
        (["-o", "out.jsonl"], "the output of tune is a .toml file"),
        (["--keep-columns", "a"], "No such option"),
        (["--template", "{{"], "no Jinja template"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, ending: Ending, arguments: list[str], message: str) -> None:
    code, out, err = ending(folder, "tune", "in.jsonl", "--model", "model", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (folder / "tuned.toml").exists()


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ([], 1, "the input has no rows"),
        (["broken", {"prompt": 5}], 1, "no row of the input can run; the first: in.jsonl:1: not JSON"),
        ([{"prompt": "hello"}], 1, "the input has only one row that can run"),
    ],
)
def test_an_input_without_a_batch_is_one_line(
    tmp_path: Path, ending: Ending, given: list[Any], code: int, message: str
) -> None:
    write_input(tmp_path, *given)
    ended, out, err = ending(tmp_path, "tune", "in.jsonl", "--model", "model")
    assert (ended, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_is_not_there_is_told(folder: Path, ending: Ending) -> None:
    for arguments, message in (
        (["tune", "--model", "model"], "no input given (cbatch tune FILE... --model MODEL)"),
        (["tune", "in.jsonl"], "no model given"),
        (["tune", "gone.jsonl", "--model", "model"], "no such input: gone.jsonl"),
        (["tune", "-", "--model", "model"], "tune reads its input more than once"),
    ):
        code, _, err = ending(folder, *arguments)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_run_takes_what_a_search_writes(folder: Path) -> None:
    """The search says in a log what it did, and `run` gets the settings that it found, and those given to it."""
    done = tune(folder, "--trials", "4", "--temperature", "0.5")
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert all(line.startswith("cbatch: ") for line in lines)
    assert "\x1b" not in done.stderr
    assert sum("trial " in line for line in lines) >= 4
    assert any(re.search(r"page_size 16, max_batch_tokens 128 \(default\): [\d.]+ ", line) for line in lines)
    assert "cbatch run INPUT --config tuned.toml -o OUTPUT" in lines[-1]
    tuned = tomllib.loads((folder / "tuned.toml").read_text())
    found = {name: tuned[name] for name in BEST}
    assert found != {"page_size": 16, "max_batch_tokens": 128}  # the default
    settings = ran_with(folder, "--config", "tuned.toml")
    assert {name: settings["engine"][name] for name in BEST} == found
    assert settings["engine"]["model"] == "model"
    assert settings["sampling"] == {"temperature": 0.5}
    overridden = ran_with(folder, "--config", "tuned.toml", "--page-size", "4")
    assert {name: overridden["engine"][name] for name in BEST} == found | {"page_size": 4}


def ran_with(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a job, and return the configuration that its engine got."""
    engine = folder / "engine.json"
    environment = os.environ | {"STUB_CONFIG": str(engine)}
    done = run_stub("run", "in.jsonl", "-o", "out.jsonl", "--restart", *arguments, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "out.jsonl.report.json").read_text())
    return {"engine": json.loads(engine.read_text()), "sampling": report["sampling"], "stderr": done.stderr}


def test_settings_for_other_rows_are_told_by_the_run(folder: Path) -> None:
    """vllm-project/vllm#17207: tuned for short prompts, used for long ones."""
    assert tune(folder, "--trials", "2").returncode == 0
    same = ran_with(folder, "--config", "tuned.toml")["stderr"]
    assert "tuned for other" not in same
    (folder / "in.jsonl").write_text(json.dumps({"prompt": "long " * 200}) + "\n")
    assert "the settings were tuned for other rows: prompts of" in ran_with(folder, "--config", "tuned.toml")["stderr"]
    (folder / "model" / "config.json").write_text('{"other": 1}')
    told = ran_with(folder, "--config", "tuned.toml")["stderr"]
    assert "the settings were tuned for other circumstances: another model" in told
    assert "tuned for other" not in ran_with(folder, "--config", "tuned.toml", "-q")["stderr"]


def test_quiet_says_nothing(folder: Path) -> None:
    done = tune(folder, "--trials", "2", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (folder / "tuned.toml").exists()


def on_terminal(folder: Path, *arguments: str, **environment: str) -> str:
    """Run a search with standard error on a pseudo-terminal, and return what it shows."""
    command = ("tune", "in.jsonl", "--model", "model", *arguments)
    return run_on_terminal(*command, cwd=folder, COLUMNS="120", **environment)


def test_a_terminal_gets_a_table_with_bars(folder: Path) -> None:
    shown = on_terminal(folder, "--trials", "4", STUB_OUT_OF_MEMORY_PAGE="64")
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert re.search(r"page_size +max_batch_tokens +rows +output tokens/s +times default +memory", plain)
    assert re.search(r"16 +128 +24 +[\d.]+ \+/- [\d.]+ +1\.000 +1 GiB +█+ ", plain)
    assert re.search(r"64 +\d+ +failed +memory ran out", plain)
    assert "\x1b[1;32m" in shown


def test_no_color_is_honoured(folder: Path) -> None:
    shown = on_terminal(folder, "--trials", "3", NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3\d", shown)
    assert "█" in shown


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [*STUB, "tune", "in.jsonl", "--model", "model", *arguments]
    names = os.environ | environment
    return subprocess.Popen(command, cwd=folder, env=names, text=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def journalled(folder: Path, kind: str) -> list[dict[str, Any]]:
    file = folder / JOURNAL
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, lines) if kind in line]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_search_goes_on_with_all_but_one_trial(folder: Path, number: int) -> None:
    process = start(folder, "--trials", "4", STUB_TUNE_STEP_S="0.05")
    wait_for(process, lambda: len(journalled(folder, "starts")) >= 4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    done = len(journalled(folder, "trial"))
    assert done >= 3
    if number == signal.SIGINT:
        assert process.returncode == 75
        assert "stopped by SIGINT" in errors
        assert "Traceback" not in errors
        assert (folder / "tuned.toml").exists()
    else:
        assert not (folder / "tuned.toml").exists()
    again = tune(folder, "--trials", "4")
    assert again.returncode == 0
    assert f"{done} trials found in {JOURNAL}" in again.stderr
    assert len(journalled(folder, "starts")) == len(journalled(folder, "trial")) + 1
    assert len(journalled(folder, "sample")) == 1
    assert {path.name for path in folder.iterdir()} == {"in.jsonl", "model", "tuned.toml", JOURNAL}


def test_two_searches_at_once_are_one_too_many(folder: Path) -> None:
    process = start(folder, "--trials", "4", STUB_TUNE_STEP_S="0.05")
    wait_for(process, lambda: (folder / "tuned.toml.lock").exists())
    second = tune(folder, "--trials", "4")
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 2
    assert "another run holds tuned.toml.lock" in second.stderr
    assert "--force-unlock" in second.stderr


def test_only_the_tables_own_settings_are_its_own() -> None:
    assert [setting.name for setting in TUNE_SETTINGS] == ["budget", "trials", "search", "output"]
