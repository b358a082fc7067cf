"""Every mistake of a user's is one line that names it and the way out, no traceback, with the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cbatch.cli import app
from cbatch.errors import EngineError, InputError, UsageError
from cbatch.jobs.paths import JobPaths
from cbatch.jobs.run import JobSummary
from tests.cli.clikit import ROOT, STUB, TIMEOUT_S, read_rows, run_job, run_stub, unprivileged, write_input

Ending = Callable[..., tuple[int, str, str]]
ARGUMENTS = ["run", "in.jsonl", "--model", "m", "-o", "out.jsonl"]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ending:
    """A function that runs the program in this process, the job replaced, and returns exit code and streams."""

    def run(*arguments: str, job: object = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cbatch", *arguments])
        if job is not None:
            monkeypatch.setattr("cbatch.jobs.run.run_job", job)
        code = app.main()
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return run


def raising(error: BaseException) -> object:
    def job(*_arguments: object, **_options: object) -> None:
        raise error

    return job


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command"),
        (["rum"], "No such command 'rum'. Did you mean 'run'?"),
        (["run"], "no input given (cbatch run FILE"),
        (["run", "in.jsonl"], "no model given (--model"),
        (["run", "in.jsonl", "--model", "m"], "no output given (-o"),
        ([*ARGUMENTS, "--pagesize", "4"], "--page-size"),
        ([*ARGUMENTS, "--page-size"], "'--page-size' requires an argument"),
        ([*ARGUMENTS, "--page-size", "none"], "--page-size must be a whole number"),
        ([*ARGUMENTS, "--gpu-memory-utilization", "0.9"], "No such option: --gpu-memory-utilization"),
        ([*ARGUMENTS, "--data-parallel-size", "2"], "No such option: --data-parallel-size"),
        ([*ARGUMENTS, "--quiet=yes"], "does not take a value"),
        ([*ARGUMENTS, "--config", "gone.toml"], "--config gone.toml: No such file or directory"),
        ([*ARGUMENTS, "--stop", "\udcff"], "--stop must be"),
    ],
)
def test_a_usage_mistake_is_one_line_and_exit_code_2(ending: Ending, arguments: list[str], message: str) -> None:
    code, out, err = ending(*arguments)
    assert code == 2
    assert not out
    assert err.startswith("cbatch: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("the model is odd", hint="choose another"), 2),
        (InputError("in.jsonl vanished"), 1),
        (EngineError("the device was lost"), 1),
        (MemoryError("no room"), 1),
        (PermissionError(13, "Permission denied", "in.jsonl"), 1),
        (RuntimeError("two\nlines\tof\x1b[31m it"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_however_a_job_fails_it_is_one_line(ending: Ending, error: BaseException, code: int) -> None:
    got, out, err = ending(*ARGUMENTS, job=raising(error))
    assert got == code
    assert not out
    assert "Traceback" not in err
    assert "\x1b" not in err
    assert err.count("\n") == (0 if isinstance(error, KeyboardInterrupt) else 1)
    if isinstance(error, UsageError):
        assert err == "cbatch: the model is odd (choose another)\n"


def test_debug_shows_where_it_arose(ending: Ending) -> None:
    code, _, err = ending(*ARGUMENTS, "--debug", job=raising(UsageError("odd")))
    assert code == 2
    assert "Traceback" in err
    assert err.endswith("cbatch: odd\n")


def test_an_error_of_our_own_points_to_debug(ending: Ending) -> None:
    _, _, err = ending(*ARGUMENTS, job=raising(KeyError("slot")))
    assert err == "cbatch: internal error, KeyError: 'slot' (run again with --debug to see where)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gone.jsonl", "-o", "out.jsonl"], 2, "no such input: gone.jsonl"),
        (["in.jsonl", "-o", "out.txt"], 2, ".jsonl or .parquet"),
        (["in.jsonl", "-o", "in.jsonl"], 2, "would be overwritten"),
        (["in.jsonl", "-o", "missing/out.jsonl"], 2, "missing"),
        (["model", "-o", "out.jsonl"], 2, "is a directory"),
    ],
)
def test_what_only_the_job_can_see_is_told_alike(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    write_input(tmp_path, {"prompt": "hello"})
    done = run_stub("run", *arguments, "--model", "model", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "message"),
    [
        (["in.jsonl", "-o", "out.jsonl"], "in.jsonl", 1, "cannot read in.jsonl: Permission denied"),
        (["closed/in.jsonl", "-o", "out.jsonl"], "closed", 1, "cannot read closed/in.jsonl: Permission denied"),
        (["closed/*.jsonl", "-o", "out.jsonl"], "closed", 1, "cannot read closed/*.jsonl: Permission denied"),
        (["in.jsonl", "-o", "closed/out.jsonl"], "closed", 2, "closed must be writable"),
        (["in.jsonl", "-o", "out.jsonl", "--checkpoint-dir", "closed"], "closed", 2, "closed must be writable"),
        (["in.jsonl", "-o", "out.jsonl"], "model", 2, "cannot read the model model"),
        (["in.jsonl", "-o", "out.jsonl"], "model/config.json", 2, "cannot read the model model/config.json"),
        (["in.jsonl", "-o", "out.jsonl"], "out.jsonl.journal.jsonl", 1, "journal.jsonl: Permission denied"),
        (["in.jsonl", "-o", "out.jsonl", "--force-unlock"], ".", 2, "must be writable"),
    ],
)
def test_what_may_not_be_read_or_written_is_one_line(
    tmp_path: Path, arguments: list[str], closed: str, code: int, message: str
) -> None:
    write_input(tmp_path, {"prompt": "hello"})
    (tmp_path / "closed").mkdir()
    (tmp_path / "out.jsonl.journal.jsonl").touch()
    path = tmp_path / closed
    mode = path.stat().st_mode
    command = [*unprivileged(), *STUB, "run", *arguments, "--model", "model"]
    path.chmod(0o500 if closed == "." else 0)
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    finally:
        path.chmod(mode)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_failed_rows_decide_the_exit_code(tmp_path: Path) -> None:
    write_input(tmp_path, {"prompt": "hello"}, "broken", {"prompt": "world"}, {"prompt": "x", "temprature": 1})
    done = run_job(tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "2 of 4 rows failed; the first: " in last
    assert "in.jsonl:2" in last
    assert "--retry-errors" in last
    assert [row["finish_reason"] for row in read_rows(tmp_path / "out.jsonl")] == ["stop", "error", "stop", "error"]
    assert run_job(tmp_path, "--error-tolerance", "0.5", "--restart").returncode == 0
    assert run_job(tmp_path, "--error-tolerance", "0.49", "--restart").returncode == 1


def test_a_finished_job_says_so_and_does_nothing(tmp_path: Path) -> None:
    write_input(tmp_path, {"prompt": "hello"})
    assert run_job(tmp_path).returncode == 0
    before = (tmp_path / "out.jsonl").stat().st_mtime_ns
    again = run_job(tmp_path)
    assert again.returncode == 0
    assert "is finished already" in again.stderr
    assert (tmp_path / "out.jsonl").stat().st_mtime_ns == before


def test_ctrl_c_is_quiet_even_before_the_program_is_there(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "cbatch", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_signals_after_the_last_line_change_no_exit_code(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: asked.append(number) if handler else None)

    def job(*_arguments: object, **_options: object) -> JobSummary:
        return JobSummary("interrupted", 75, JobPaths.of("out.jsonl"), 3, reason="SIGTERM")

    code, out, err = ending(*ARGUMENTS, "-q", job=job)
    assert (code, out) == (75, "")
    assert err == "cbatch: stopped by SIGTERM: 3 finished rows safe; run the same command again to resume\n"
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP} <= set(asked)
