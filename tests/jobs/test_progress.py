"""Spec I6: what a running job shows on a terminal, in a log, quietly, and to nobody."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import EngineConfig
from cbatch.jobs.progress import LOG_INTERVAL_S, Progress, Snapshot
from tests.jobs.jobkit import Bench, prompts
from tests.jobs.test_signals import Process
from tests.stub_engine import StubEngine

ROOT = Path(__file__).parent.parent.parent


def snapshot(rows_done: int, **values: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "rows_replayed": 0,
        "rows_error": 0,
        "output_tokens": rows_done * 10,
        "num_running": 8,
        "num_waiting": 16,
        "cache_usage": 0.456,
    }
    return Snapshot(rows_done=rows_done, **defaults | values)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


def log(total: int | None, *moments: tuple[float, Snapshot]) -> list[str]:
    """The lines that a log gets."""
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream=stream, count_rows=lambda: total, clock=lambda: now[0])
    for at, taken in moments:
        now[0] = at
        progress.update(lambda taken=taken: taken)  # type: ignore[misc]
    progress.close()
    return stream.getvalue().splitlines()


def test_a_log_gets_one_line_per_interval_and_no_control_characters() -> None:
    moments = [(second / 10, snapshot(second)) for second in range(1000)]
    lines = log(1000, *moments)
    assert len(lines) == 3
    assert lines[0] == "cbatch: 300/1000 rows (30%), 100 tokens/s, 8 running, 16 waiting, cache 46%, 0:01:10 left"
    assert all(line.isprintable() for line in lines)


def test_rates_are_of_this_process_and_replayed_rows_are_not_its_work() -> None:
    lines = log(
        1000,
        (0, snapshot(900, rows_replayed=900, output_tokens=0)),
        (LOG_INTERVAL_S, snapshot(910, rows_replayed=900, output_tokens=300)),
    )
    assert lines == ["cbatch: 910/1000 rows (91%), 10 tokens/s, 8 running, 16 waiting, cache 46%, 0:04:30 left"]


def test_failed_rows_are_counted_and_an_unknown_total_is_a_question_mark() -> None:
    lines = log(None, (0, snapshot(0)), (LOG_INTERVAL_S, snapshot(7, rows_error=3)))
    assert lines[0].startswith("cbatch: 7/? rows, 3 failed, ")
    assert lines[0].endswith(", ? left")


def test_an_input_that_grew_since_it_was_counted_has_no_known_end() -> None:
    lines = log(10, (0, snapshot(0)), (LOG_INTERVAL_S, snapshot(10)), (2 * LOG_INTERVAL_S, snapshot(12)))
    assert (lines[0].split(",")[0], lines[0].split()[-2]) == ("cbatch: 10/10 rows (100%)", "0:00:00")
    assert (lines[1].split(",")[0], lines[1].split()[-2]) == ("cbatch: 12/? rows", "?")


def test_the_snapshot_is_taken_only_when_it_is_drawn() -> None:
    taken = []
    progress = Progress(stream=io.StringIO(), clock=lambda: 0.0)

    def take() -> Snapshot:
        taken.append(1)
        return snapshot(1)

    for _ in range(100):
        progress.update(take)
    assert len(taken) == 1


def draw(terminal: Terminal) -> str:
    now = [0.0]
    progress = Progress(stream=terminal, count_rows=lambda: 100, clock=lambda: now[0])
    for moment in range(10):
        now[0] = moment
        progress.update(lambda: snapshot(int(now[0]) * 10))
        if moment == 5:
            progress.say("half way")
    progress.close()
    return terminal.getvalue()


def test_a_terminal_gets_a_bar_with_the_state_of_the_engine() -> None:
    drawn = draw(Terminal())
    assert "90/100" in drawn
    assert "8 running, 16 waiting, cache 46%" in drawn
    assert "100 tokens/s" in drawn
    assert "█" in drawn
    assert "cbatch: half way\n" in drawn


def test_an_ascii_terminal_gets_ascii() -> None:
    drawn = draw(Terminal("ascii"))
    assert drawn.isascii()
    assert "90/100" in drawn
    assert "#" in drawn


def test_a_dumb_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\r" not in draw(Terminal())


def test_quiet_shows_nothing() -> None:
    stream = Terminal()
    progress = Progress(quiet=True, stream=stream)
    progress.say("hello")
    progress.update(lambda: snapshot(1))
    progress.close()
    assert stream.getvalue() == ""


def test_messages_fit_the_streams_characters_and_one_line() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream=stream).say("loading /models/émoji 👍\nand more")
    stream.flush()
    assert stream.buffer.getvalue() == b"cbatch: loading /models/\\xe9moji \\U0001f44d and more\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_stream_that_fails_is_left_alone(error: type[Exception]) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise error

    progress = Progress(stream=Broken(), clock=iter(range(0, 10_000, 100)).__next__)
    progress.say("hello")
    for _ in range(3):
        progress.update(lambda: snapshot(1))
    progress.close()


@pytest.mark.parametrize("name", ["cbatch.models.load", "cbatch_kernels.compile"])
def test_warnings_of_the_engine_are_said_as_all_else_is(
    bench: Bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(config: EngineConfig) -> StubEngine:
        logging.getLogger(name).warning("one %s\ntwo", 1)
        return StubEngine(config)

    bench.load = load  # type: ignore[method-assign]
    bench.run(quiet=False)
    assert "cbatch: one 1 two\n" in capsys.readouterr().err
    bench.run(quiet=True, restart=True)
    assert capsys.readouterr().err == ""
    assert logging.getLogger(name.partition(".")[0]).handlers == []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.write(prompts(40))
    return bench


def test_a_job_whose_output_is_a_file_leaves_a_clean_log(bench: Bench) -> None:
    code, errors = Process(bench, environment={"STUB_STEP_S": "0.01"}).end()
    assert code == 0
    assert re.search(r"^cbatch: loading ", errors, re.MULTILINE)
    assert "\r" not in errors
    assert "\x1b" not in errors
    assert all(line.startswith("cbatch: ") for line in errors.splitlines())


def test_a_quiet_job_is_silent(bench: Bench) -> None:
    assert Process(bench, quiet=True).end() == (0, "")


def on_terminal(bench: Bench, environment: dict[str, str]) -> str:
    """Run a job whose standard error is a terminal, and return what was drawn there."""
    ours, theirs = pty.openpty()
    process = Process.start(bench, environment=environment, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        drawn += chunk
    os.close(ours)
    process.communicate()
    assert process.returncode == 0
    return drawn.decode("utf-8")


def test_a_job_on_a_terminal_draws_a_bar(bench: Bench) -> None:
    drawn = on_terminal(bench, {"STUB_STEP_S": "0.02", "TERM": "xterm", "NO_COLOR": "1"})
    assert "/40" in drawn
    assert "running" in drawn
    assert not re.search(r"\x1b\[\d*(;\d+)*m", drawn), "no colours"


def test_a_job_under_the_c_locale_runs_and_writes_utf8(bench: Bench) -> None:
    bench.write([{"prompt": "漢字 👍🏽"}, *prompts(40)])
    named = bench.path / "émoji 👍.jsonl"
    (bench.path / "in.jsonl").rename(named)
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "STUB_STEP_S": "0.02", "TERM": "xterm"}
    code, _ = Process(bench, environment=locale, inputs=[str(named)]).end()
    assert code == 0
    assert bench.rows()[0]["prompt"] == "漢字 👍🏽"


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >/dev/null 2>&-", "</dev/null >/dev/null 2>/dev/null"])
def test_a_job_under_cron_runs_with_closed_streams(bench: Bench, closed: str) -> None:
    arguments = Process.arguments(bench)
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=120, check=False)
    assert done.returncode == 0
    assert len(bench.rows()) == 40
    assert sys.stdout is not None
