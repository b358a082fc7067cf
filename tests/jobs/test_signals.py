"""Spec J4, I7: signals in every phase, the drain, and what a stopped run leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cbatch.jobs.merge import merge_parts
from cbatch.jobs.stop import SIGNALS
from tests.jobs.jobkit import Bench, prompts

ROOT = Path(__file__).parent.parent.parent
RESUMABLE = 75
ENDS_S = 30.0  # far beyond what any phase needs, for a machine under load


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def _take_signals() -> None:
    """Undo what nohup and shells in the background leave to their children: a signal that is ignored stays ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ignore_hangups() -> None:
    """Do what nohup does for its child."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Process:
    """A job in a process of its own."""

    def __init__(
        self,
        bench: Bench,
        *,
        environment: dict[str, str] | None = None,
        before: Callable[[], None] = _take_signals,
        **options: Any,
    ) -> None:
        self.bench = bench
        self.process = self.start(bench, environment=environment, stderr=subprocess.PIPE, before=before, **options)

    @staticmethod
    def arguments(bench: Bench, **options: Any) -> list[str]:
        """The command that runs a job."""
        settings = {
            "inputs": [str(bench.path / "in.jsonl")],
            "output": str(bench.output),
            "model": str(bench.path / "model"),
        }
        return [sys.executable, "-m", "tests.stub_engine", "job", json.dumps(settings | options, ensure_ascii=False)]

    @classmethod
    def start(
        cls,
        bench: Bench,
        *,
        environment: dict[str, str] | None,
        stderr: int,
        before: Callable[[], None] = _take_signals,
        **options: Any,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            cls.arguments(bench, **options),
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=before,
        )

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDS_S
        while not happened():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for_line(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"ended without {text!r}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=ENDS_S)
        assert "Traceback" not in errors, errors
        return self.process.returncode, errors

    def journalled(self) -> int:
        journal = self.bench.output.with_name("out.jsonl.journal.jsonl")
        return journal.read_bytes().count(b'"result"') if journal.exists() else 0


def assert_resumes(bench: Bench, *, at_least: int = 0) -> None:
    """Nothing but the journal was left behind, and the job can be finished."""
    assert not bench.output.exists()
    summary = bench.run()
    assert [path.name for path in bench.path.iterdir() if path.suffix in (".lock", ".partial")] == []
    assert summary.status == "done"
    assert summary.rows_replayed >= at_least
    assert summary.rows_replayed + bench.num_prompts_run == summary.rows
    assert [row["id"] for row in bench.rows()] == list(range(summary.rows))


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_drains_and_exits_75(bench: Bench, number: int) -> None:
    bench.write([row | {"max_tokens": 3 + row["id"] % 5} for row in prompts(2000)])  # never all done at once
    process = Process(bench, environment={"STUB_STEP_S": "0.01"})
    process.wait_for(lambda: process.journalled() > 20)
    process.send(number)
    code, errors = process.end()
    assert code == RESUMABLE
    assert re.search(rf"{signal.Signals(number).name}: finishing [1-8] running rows", errors)
    assert "run the same command again to resume" in errors
    assert_resumes(bench, at_least=22)


def test_a_stopped_process_that_is_continued_to_be_ended_drains_as_well(bench: Bench) -> None:
    """As Slurm does with a suspended job that it cancels."""
    bench.write([row | {"max_tokens": 3 + row["id"] % 5} for row in prompts(2000)])
    process = Process(bench, environment={"STUB_STEP_S": "0.01"})
    process.wait_for(lambda: process.journalled() > 8)
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM):
        process.send(number)
    code, errors = process.end()
    assert code == RESUMABLE
    assert "SIGTERM: finishing" in errors
    assert_resumes(bench, at_least=9)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
def test_the_first_process_of_a_container_hears_signals(bench: Bench) -> None:
    """For process 1 the kernel drops every signal that has no handler."""
    bench.write([row | {"max_tokens": 3 + row["id"] % 5} for row in prompts(2000)])
    command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", *Process.arguments(bench)]
    environment = os.environ | {"STUB_STEP_S": "0.01"}
    outer = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    journal = bench.path / "out.jsonl.journal.jsonl"
    deadline = time.monotonic() + ENDS_S
    while not journal.exists() or journal.read_bytes().count(b'"result"') < 9:
        if outer.poll() is not None and "unshare" in (errors := outer.communicate()[1]):
            pytest.skip(errors)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (inner,) = psutil.Process(outer.pid).children()
    inner.send_signal(signal.SIGTERM)
    _, errors = outer.communicate(timeout=ENDS_S)
    assert outer.returncode == RESUMABLE
    assert "SIGTERM: finishing" in errors
    assert_resumes(bench, at_least=9)


def test_rows_that_do_not_finish_within_the_grace_are_left_for_the_next_run(bench: Bench) -> None:
    bench.write(prompts(50, max_tokens=1000, ignore_eos=True))
    process = Process(bench, environment={"STUB_STEP_S": "0.05"}, grace=0.3, interrupted_exit_code=9)
    process.wait_for_line("loaded")
    time.sleep(0.3)
    process.send(signal.SIGTERM)
    assert process.end()[0] == 9
    assert_resumes(bench)


def test_the_second_signal_aborts_the_drain(bench: Bench) -> None:
    bench.write(prompts(50, max_tokens=1000, ignore_eos=True))
    process = Process(bench, environment={"STUB_STEP_S": "0.05"}, grace=3600.0)
    process.wait_for_line("loaded")
    time.sleep(0.3)
    process.send(signal.SIGTERM)
    process.wait_for_line("finishing 8 running rows")
    process.send(signal.SIGTERM)
    assert process.end()[0] == RESUMABLE
    assert_resumes(bench)


def test_a_signal_while_the_model_loads(bench: Bench) -> None:
    bench.write(prompts(5))
    process = Process(bench, environment={"STUB_LOAD_S": "3600"})
    process.wait_for_line("loading")
    time.sleep(0.2)
    process.send(signal.SIGTERM)
    code, errors = process.end()
    assert code == RESUMABLE
    assert "stopped by SIGTERM" in errors
    assert_resumes(bench)


def test_a_signal_while_loading_hangs_outside_python(bench: Bench) -> None:
    bench.write(prompts(5))
    process = Process(bench, environment={"STUB_LOAD_HANGS": "1"}, grace=0.1)
    process.wait_for_line("loading")
    time.sleep(0.2)
    process.send(signal.SIGTERM)
    code, errors = process.end()
    assert code == RESUMABLE
    assert "stopped by SIGTERM; run the same command again to resume" in errors
    assert_resumes(bench)


def test_the_third_signal_ends_what_hangs_outside_python_at_once(bench: Bench) -> None:
    bench.write(prompts(5))
    process = Process(bench, environment={"STUB_LOAD_HANGS": "1"}, grace=3600.0)
    process.wait_for_line("loading")
    time.sleep(0.2)
    for _ in range(3):
        process.send(signal.SIGINT)
        time.sleep(0.1)
    code, errors = process.end()
    assert code == RESUMABLE
    assert "stopped by SIGINT; run the same command again to resume" in errors
    assert_resumes(bench)


def test_a_signal_while_waiting_for_standard_input(bench: Bench) -> None:
    process = Process(bench, inputs=["-"])
    process.wait_for(lambda: (bench.path / "out.jsonl.lock").exists())
    time.sleep(0.3)
    process.send(signal.SIGINT)
    process.process.wait(ENDS_S)  # standard input is still open
    assert process.end() == (RESUMABLE, "cbatch: stopped by SIGINT; run the same command again to resume\n")


@pytest.mark.parametrize("phase", ["input", "load", "rows"])
def test_a_quiet_run_that_is_stopped_says_in_one_line_how_to_resume(bench: Bench, phase: str) -> None:
    bench.write(prompts(100))
    environment = {"STUB_LOAD_S": "3600"} if phase == "load" else {"STUB_STEP_S": "0.05"}
    name = "-" if phase == "input" else str(bench.path / "in.jsonl")
    process = Process(bench, environment=environment, quiet=True, inputs=[name])
    if phase == "rows":
        process.wait_for(lambda: process.journalled() >= 8)
    else:
        process.wait_for(lambda: (bench.path / "out.jsonl.journal.jsonl").exists())
        time.sleep(0.3)
    process.send(signal.SIGTERM)
    process.process.wait(ENDS_S)
    code, errors = process.end()
    assert code == RESUMABLE
    safe = r": \d+ finished rows safe" if phase == "rows" else ""
    assert re.fullmatch(f"cbatch: stopped by SIGTERM{safe}; run the same command again to resume\n", errors)


def test_a_signal_while_standard_input_stays_silent_in_the_middle(bench: Bench) -> None:
    process = Process(bench, inputs=["-"])
    assert process.process.stdin is not None
    process.process.stdin.write("".join(json.dumps(row) + "\n" for row in prompts(20)))
    process.process.stdin.flush()
    process.wait_for(lambda: process.journalled() == 20)
    process.send(signal.SIGINT)
    process.process.wait(ENDS_S)  # standard input is still open
    assert process.end()[0] == RESUMABLE


def test_a_signal_while_rows_are_tokenised(bench: Bench) -> None:
    bench.write(prompts(100_000))
    process = Process(bench, environment={"STUB_ENCODE_S": "0.05"})
    process.wait_for_line("loaded")
    process.send(signal.SIGTERM)
    assert process.end()[0] == RESUMABLE


def test_a_signal_while_the_output_is_put_together(bench: Bench) -> None:
    bench.write(prompts(20_000, max_tokens=1))
    process = Process(bench)
    partial = bench.path / ".out.jsonl.partial"
    process.wait_for(lambda: partial.exists() and partial.stat().st_size > 0)
    process.send(signal.SIGTERM)
    code, errors = process.end()
    assert code == RESUMABLE, errors
    assert "stopped by SIGTERM: 20000 finished rows safe; run the same command again to resume\n" in errors
    assert_resumes(bench, at_least=20_000)


def test_the_end_of_a_slurm_job_is_a_signal_in_time(bench: Bench) -> None:
    bench.write(prompts(100_000))
    end = str(int(time.time()) + 9)
    process = Process(bench, environment={"STUB_STEP_S": "0.01", "SLURM_JOB_END_TIME": end}, grace=1.0)
    code, errors = process.end()
    assert code == RESUMABLE
    assert "the end of the Slurm job (SLURM_JOB_END_TIME): finishing" in errors
    assert time.time() < int(end)


def test_a_slurm_job_that_is_about_to_end_stops_in_order_at_once(bench: Bench) -> None:
    bench.write(prompts(100))
    for end in ("0", str(int(time.time()))):
        code, errors = Process(bench, environment={"STUB_STEP_S": "0.05", "SLURM_JOB_END_TIME": end}).end()
        assert code == RESUMABLE
        assert "the end of the Slurm job (SLURM_JOB_END_TIME)" in errors
        assert not bench.output.exists()


@pytest.mark.parametrize("end", ["4294967294", "9" * 22, "9" * 400])
def test_a_slurm_job_without_an_end_is_none_that_ends(bench: Bench, end: str) -> None:
    bench.write(prompts(3))
    assert Process(bench, environment={"SLURM_JOB_END_TIME": end}).end()[0] == 0
    assert len(bench.rows()) == 3


def test_ignored_signals_stay_ignored(bench: Bench) -> None:
    bench.write(prompts(300))
    process = Process(bench, environment={"STUB_STEP_S": "0.005"}, before=_ignore_hangups)
    process.wait_for(lambda: process.journalled() > 20)
    process.send(signal.SIGHUP)
    assert process.end()[0] == 0
    assert len(bench.rows()) == 300


def test_handlers_are_as_before_once_the_job_ended(bench: Bench) -> None:
    bench.write(prompts(3))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    bench.run()
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_during_a_merge_leaves_the_parts_and_no_output(bench: Bench) -> None:
    """The parts are larger than a moment's work, so that the signal finds the merge under way."""
    bench.write(prompts(30_000))
    for index in range(2):
        assert bench.run(shard=f"{index}/2").status == "done"
    code = (
        f"import sys; from cbatch.jobs.merge import merge_parts; sys.exit(merge_parts({str(bench.output)!r}).exit_code)"
    )
    merging = subprocess.Popen(
        [sys.executable, "-c", code, str(bench.output)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + ENDS_S
    while not list(bench.path.glob(".*out.jsonl*")) and not list(bench.path.glob("out.jsonl.*partial*")):
        assert merging.poll() is None
        assert time.monotonic() < deadline
    merging.send_signal(signal.SIGTERM)
    _, errors = merging.communicate(timeout=ENDS_S)
    assert (merging.returncode, "Traceback" in errors) == (RESUMABLE, False), errors
    assert not bench.output.exists()
    assert merge_parts(str(bench.output)).rows == 30_000
    assert [row["id"] for row in bench.rows()] == list(range(30_000))
