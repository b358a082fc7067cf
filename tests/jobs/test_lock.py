"""Spec J2, J5: two runs on one output, and locks whose holder is dead, elsewhere or robbed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import CbatchError, OutputError, UsageError
from cbatch.jobs import lock as locking
from cbatch.jobs.lock import JobLock
from cbatch.jobs.paths import JobPaths
from tests.jobs.jobkit import Bench, prompts
from tests.jobs.test_signals import Process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.lock"


def leave(path: Path, *, host: str | None = None, pid: int = 1, age_s: float = 0.0) -> None:
    """Leave a lock file behind, as a process that was killed does."""
    path.write_text(json.dumps({"host": host or socket.gethostname(), "pid": pid, "process_started": 1.0}))
    os.utime(path, (time.time() - age_s,) * 2)


def test_the_lock_says_who_holds_it_and_goes_away(path: Path) -> None:
    with JobLock(path):
        holder = json.loads(path.read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
    assert not path.exists()


def test_a_second_holder_is_refused_with_host_pid_and_heartbeat(path: Path) -> None:
    with JobLock(path), pytest.raises(UsageError) as caught, JobLock(path):
        pass
    message = str(caught.value)
    assert f"process {os.getpid()} on {socket.gethostname()} since " in message
    assert "last heartbeat 0 s ago" in message
    assert "--force-unlock" in message


def test_two_processes_on_one_output(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(prompts(600))
    first = Process(bench, environment={"STUB_STEP_S": "0.01"})
    first.wait_for(lambda: first.journalled() > 10)
    code, errors = Process(bench).end()
    assert code == 2
    assert f"process {first.process.pid} on {socket.gethostname()}" in errors
    assert errors.count("\n") == 1
    assert first.end()[0] == 0
    assert [row["id"] for row in bench.rows()] == list(range(600))


def test_a_link_to_an_output_is_that_output(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(prompts(3))
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "out.jsonl"
    link.symlink_to(bench.output)
    with JobLock(JobPaths.of(str(bench.output)).locks[0]), pytest.raises(UsageError, match="another run holds"):
        bench.run(output=str(link))
    assert bench.run(output=str(link)).rows == 3
    assert len(bench.rows()) == 3
    assert sorted(path.name for path in tmp_path.rglob("*.lock")) == []


def test_two_outputs_of_one_name_do_not_write_one_journal_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(prompts(2000))
    for name in ("a", "b", "kept"):
        (tmp_path / name).mkdir()
    options = {"checkpoint_dir": str(tmp_path / "kept"), "environment": {"STUB_STEP_S": "0.01"}}
    first = Process(bench, output=str(tmp_path / "a" / "out.jsonl"), **options)
    first.wait_for_line("loaded")
    with pytest.raises(UsageError, match=rf"another run holds .*kept.*process {first.process.pid} on"):
        bench.run(output=str(tmp_path / "b" / "out.jsonl"), checkpoint_dir=str(tmp_path / "kept"))
    first.send(signal.SIGTERM)
    assert first.end()[0] == 75
    summary = bench.run(output=str(tmp_path / "b" / "out.jsonl"), checkpoint_dir=str(tmp_path / "kept"))
    assert (summary.status, summary.rows) == ("done", 2000)
    assert summary.rows_replayed > 0
    assert sorted(path.name for path in tmp_path.rglob("*.lock")) == []


def test_a_killed_holder_leaves_a_lock_that_is_free(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(prompts(600))
    process = Process(bench, environment={"STUB_STEP_S": "0.01"})
    process.wait_for(lambda: process.journalled() > 10)
    process.send(signal.SIGKILL)
    process.process.wait()
    process.process.communicate()
    assert (tmp_path / "out.jsonl.lock").exists()
    assert bench.run().rows_replayed > 10


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"host": 3}'])
def test_a_lock_torn_by_a_crash_is_free(path: Path, content: str) -> None:
    path.write_text(content)
    os.utime(path, (1, 1))
    with JobLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_holder_on_another_host_counts_while_its_heart_beats(path: Path) -> None:
    leave(path, host="node7", age_s=10)
    with pytest.raises(UsageError, match=r"process 1 on node7 .*last heartbeat 1\d s ago"), JobLock(path):
        pass
    assert "node7" in path.read_text(), "the refused one leaves it alone"
    leave(path, host="node7", age_s=3600)
    with JobLock(path):
        assert "node7" not in path.read_text()


def test_force_takes_the_lock_and_the_robbed_run_hears_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "HEARTBEAT_S", 0.01)
    lost: list[bool] = []
    with JobLock(path, lost=lambda: lost.append(True)) as robbed:
        with JobLock(path, force=True) as robber:
            deadline = time.monotonic() + 30
            while not lost and time.monotonic() < deadline:
                time.sleep(0.01)
            assert lost == [True]
            robber.check()
            with pytest.raises(OutputError, match="another run has taken the lock"):
                robbed.check()
        assert not path.exists()


@pytest.mark.parametrize(
    ("is_taken", "says"), [(False, "somebody removed the lock"), (True, "another run has taken the lock")]
)
def test_a_run_whose_lock_is_lost_stops_and_writes_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool, says: str
) -> None:
    monkeypatch.setattr(locking, "HEARTBEAT_S", 0.01)
    bench = Bench(tmp_path)
    bench.write(prompts(2000))
    bench.engine_options = {"step_s": 0.01}
    real = bench.load

    def load(config: Any) -> Any:
        (tmp_path / "out.jsonl.lock").unlink()
        if is_taken:
            (tmp_path / "out.jsonl.lock").touch()
        return real(config)

    bench.load = load  # type: ignore[method-assign]
    with pytest.raises(CbatchError, match=says):
        bench.run()
    assert not bench.output.exists()


def no_flock(_file: int, _how: int) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


def test_without_flock_a_living_process_holds_and_a_dead_one_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    leave(path, pid=os.getpid())
    with JobLock(path):
        pass  # the process number is this one's, but the process that wrote it began at another time
    with JobLock(path), pytest.raises(UsageError, match="another run holds"), JobLock(path):
        pass


def test_the_heart_beats(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "HEARTBEAT_S", 0.01)
    with JobLock(path):
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 30
        while path.stat().st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 2


def test_many_processes_that_start_at_once_leave_one_holder(path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from cbatch.jobs.lock import JobLock\n"
        "try:\n"
        "    with JobLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"
        "except Exception as error: print(type(error).__name__, flush=True)\n"
    )
    leave(path, host="node7", age_s=3600)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    answers = [process.stdout.readline().strip() for process in processes if process.stdout]
    for process in processes:
        process.communicate("")
    assert sorted(answers) == ["UsageError"] * 3 + ["held"]
