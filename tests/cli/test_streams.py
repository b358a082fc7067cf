"""Results to files, talk to standard error; whatever state the standard streams and the environment are in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.clikit import read_rows, run_job, run_on_terminal, run_stub, shell, write_input

JOB = "run in.jsonl --model model -o out.jsonl"
LOG_LINE = r"cbatch: \d+ rows in [\d.]+ s: 2 ok, 0 failed, 16 tokens, [\d.]+ a second of generation; "
LOG_LINE += r"out\.jsonl and .*report\.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path, {"prompt": "hello"}, {"prompt": "wörld"})
    return tmp_path


def check_output(folder: Path) -> None:
    assert [row["finish_reason"] for row in read_rows(folder / "out.jsonl")] == ["stop", "stop"]


def test_a_log_gets_plain_lines_and_one_summary(folder: Path) -> None:
    done = run_job(folder)
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert all(line.startswith("cbatch: ") for line in lines)
    assert re.fullmatch(LOG_LINE, lines[-1])
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr


def test_quiet_says_nothing_but_errors(folder: Path) -> None:
    assert run_job(folder, "--quiet").stderr == ""
    (folder / "in.jsonl").write_text("broken\n")
    done = run_job(folder, "-q", "--restart")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "1 of 1 row failed" in done.stderr


def test_a_tuned_file_says_what_differs_and_changes_nothing_else(folder: Path) -> None:
    (folder / "tuned.toml").write_text("[evidence]\nmodel_identity = 'of another'\n")
    done = run_job(folder, "--config", "tuned.toml")
    assert done.returncode == 0, done.stderr
    assert "the settings were tuned for other circumstances: another model" in done.stderr
    check_output(folder)


def test_verbose_gives_every_setting_its_reason(folder: Path) -> None:
    assert "max_requests_per_batch = 8 (stub)" in run_job(folder, "-v").stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_harms_nothing(folder: Path, closed: str) -> None:
    done = shell(f'exec "$@" {JOB} {closed}', folder)
    assert done.returncode == 0
    check_output(folder)
    assert "cbatch:" not in (folder / "out.jsonl").read_text()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": "/nonexistent", "TERM": "dumb"},
        {"COLUMNS": "20", "TERM": "xterm-256color"},
    ],
)
def test_cron_knows_no_home_no_terminal_and_no_locale(folder: Path, environment: dict[str, str]) -> None:
    (folder / "in.jsonl").rename(folder / "wörld.jsonl")
    done = shell('exec "$@" run *.jsonl --model model -o out.jsonl', folder, **environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(LOG_LINE, done.stderr.splitlines()[-1])
    check_output(folder)
    failed = shell('exec "$@" run gone-wörld.jsonl --model model -o out.jsonl', folder, **environment)
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_failure_to_talk_about(folder: Path, unbuffered: str) -> None:
    script = '{ "$@" run --help; echo $? >code; } | head -n 1'
    done = shell(script, folder, PYTHONUNBUFFERED=unbuffered)
    assert done.stdout.startswith("Usage:")
    assert done.stderr == ""
    assert (folder / "code").read_text().strip() in ("0", "141")
    closed = shell('{ sleep 0.2; "$@" run --help; echo $? >code; } | true', folder, PYTHONUNBUFFERED=unbuffered)
    assert closed.stderr == ""
    assert (folder / "code").read_text() == "141\n"


def test_a_log_reader_that_goes_away_leaves_the_output_whole(folder: Path) -> None:
    done = shell(f'{{ "$@" {JOB}; echo $? >code; }} 2>&1 | true', folder)
    assert done.stderr == ""
    assert (folder / "code").read_text() == "0\n"
    check_output(folder)


def on_terminal(folder: Path, **environment: str) -> str:
    """Run the job with standard error on a pseudo-terminal, and return what it shows."""
    return run_on_terminal(*JOB.split(), cwd=folder, **environment)


def test_a_terminal_gets_a_table(folder: Path) -> None:
    shown = on_terminal(folder)
    assert re.search(r"rows.*2 ok", shown)
    assert re.search(r"completions.*16 tokens", shown)
    assert "\x1b[1m" in shown
    check_output(folder)


def test_the_names_of_files_are_whole_on_a_narrow_terminal(folder: Path) -> None:
    name = f"{'-'.join(['long'] * 20)}.jsonl"
    shown = run_on_terminal(*JOB.replace("out.jsonl", name).split(), cwd=folder, COLUMNS="60")
    assert name in re.sub(r"\s+", "", shown)
    assert "…" not in shown


def test_no_color_is_honoured(folder: Path) -> None:
    shown = on_terminal(folder, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3\d", shown)
    assert re.search(r"rows.*2 ok", shown)


def test_version_and_module_form(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "cbatch", "--version"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"cbatch \d+\.\d+\.\d+\n", done.stdout)
    assert run_stub("--version", cwd=tmp_path).stdout == done.stdout
