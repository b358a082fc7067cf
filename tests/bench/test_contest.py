"""Runs in processes of their own: whose turn it is, what crosses the pipes, and every way in which one can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cbatch.bench.contest import Contest, OnRun, Result, enter
from cbatch.bench.contestants import Contestant, choose_modes, read_peers
from cbatch.bench.workload import Workload
from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.jobs.totals import Targets

READ = "import json, os, sys; task = json.loads(sys.stdin.readline()); rows = task['rows']\n"
OUTCOME = "{'token_times': times, 'load_s': 0.5, 'peak_rss_bytes': 1000, 'peak_device_bytes': None, 'version': 'v', "
ANSWER = f"print(json.dumps({OUTCOME}'settings': {{}}, 'cached_tokens': 1}}))\n"
GOOD = READ + "times = [[0.1 * (i + 1) for i in range(count)] for _, count in rows]\n" + ANSWER


def contestant(name: str, code: str) -> Contestant:
    return Contestant(name, (sys.executable, "-c", code), {"who": name})


def make_contest(**engine: object) -> Contest:
    config = EngineConfig(model="m", **engine)  # type: ignore[arg-type]
    workload = Workload([([5, 6], 2), ([7], 3)])
    return Contest(workload, config, "float32", "cpu", 2, Targets())


def say_nothing(_result: Result, _repeat: int) -> None:
    pass


def hold(contestants: Sequence[Contestant], repeats: int = 1, on_run: OnRun = say_nothing) -> list[Result]:
    results = enter(contestants)
    make_contest().run(results, repeats, on_run)
    return results


def run(code: str) -> Result:
    (result,) = hold([contestant("x", code)])
    return result


def test_everybody_runs_in_turns_and_every_other_round_backwards() -> None:
    seen = []
    results = hold(
        [contestant(name, GOOD) for name in "abc"],
        3,
        lambda result, repeat: seen.append((result.contestant.name, repeat)),
    )
    assert seen == [(name, repeat) for repeat, names in enumerate(("abc", "cba", "abc")) for name in names]
    assert all(len(result.runs) == 3 and result.median is not None for result in results)


def test_the_outcome_becomes_figures() -> None:
    result = run(GOOD)
    assert result.error is None
    assert result.median is not None
    assert result.median.output_tokens_per_s == pytest.approx(5 / 0.3)
    assert (result.median.load_s, result.median.peak_rss_bytes) == (0.5, 1000)
    assert (result.version, result.cached_tokens) == ("v", 1)


def test_the_task_says_what_everybody_has_in_common() -> None:
    task = make_contest(max_requests_per_batch=7).task()
    assert task["rows"] == [([5, 6], 2), ([7], 3)]
    assert (task["longest"], task["max_requests"], task["max_batch_tokens"], task["dtype"]) == (4, 7, None, "float32")
    assert EngineConfig(**task["engine"]) == EngineConfig(model="m", max_requests_per_batch=7)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (READ + "raise RuntimeError('no such kernel')", "RuntimeError: no such kernel"),
        (READ + "print(json.dumps({'error': 'it does not fit'}))", "it does not fit"),
        (READ, "its process ended without a word, exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended without a word, killed by SIGKILL"),
        (GOOD.replace("range(count)", "range(count - 1)"), "row 0 has 1 tokens in place of 2"),
        (GOOD.replace("in rows]", "in rows[:1]]"), "it answered 1 of 2 rows"),
        (READ + "print('not JSON')", "its answer is not JSON: not JSON"),
    ],
)
def test_a_run_that_fails_is_a_result_with_its_last_word(code: str, error: str) -> None:
    result = run(code)
    assert (result.error, result.median) == (error, None)
    assert result.as_dict()["error"] == error


def test_who_failed_once_takes_no_further_part_and_stops_nobody_else() -> None:
    seen = []
    bad, good = hold(
        [contestant("bad", "1 / 0"), contestant("good", GOOD)], 2, lambda result, _: seen.append(result.contestant.name)
    )
    assert seen == ["bad", "good", "good"]
    assert (bad.error, good.error) == ("ZeroDivisionError: division by zero", None)


def test_what_a_run_started_ends_with_it(tmp_path: Path) -> None:
    file = str(tmp_path / "pid")
    spawn = f"import subprocess\np = subprocess.Popen(['sleep', '60'])\nopen({file!r}, 'w').write(str(p.pid))\n"
    assert run(spawn + GOOD).error is None
    assert not is_running(int((tmp_path / "pid").read_text()))


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except FileNotFoundError:
            return False
        time.sleep(0.05)
    return True


def test_a_driver_ends_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    code = "import time; from cbatch.bench.peer_driver import read_task\n"
    code += "read_task(); print('read', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"{}\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"read\n"
    process.stdin.close()
    assert process.wait(timeout=30) == 1
    process.stdout.close()


# Names


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ("naive,fast", "--modes names 'fast', which is none"),
        ("naive,,static", "--modes names '', which is none"),
        ("", "known: naive"),
    ],
)
def test_a_mode_that_is_none_is_a_usage_error(modes: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_modes(modes)


def test_the_default_modes_are_all_there_are() -> None:
    from cbatch.config import BenchConfig
    from cbatch.engine.modes import MODES

    assert [mode.name for mode in choose_modes(BenchConfig().modes)] == list(MODES)


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("sglang", "--against names 'sglang', which is no peer"),
        ("vllm=/no/such/python", "there is no program of that name"),
        ("transformers,transformers=python3", "names a peer twice"),
        ("vllm=/bin/true", "/bin/true is no Python that runs here"),
    ],
)
def test_a_peer_that_cannot_be_is_a_usage_error(against: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_peers(against)


def test_a_peer_that_is_not_installed_takes_no_part_and_says_how_to_install_it(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # an interpreter without packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    here, there = read_peers(f"transformers,vllm={bare}")
    assert here.missing is None
    assert there.missing == f"vllm is not installed in {bare} (pip install vllm)"
    result, other = hold([there, contestant("good", GOOD)])
    assert (result.error, other.error) == (there.missing, None)


def test_settings_of_the_environment_win_over_what_a_peer_runs_best_with(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = "sys.exit(os.environ['OMP_NUM_THREADS'] + os.environ['BEST'] + os.environ['OTHER'])"
    who = Contestant("x", (sys.executable, "-c", READ + tell), {}, {"BEST": "best", "OTHER": "best"})
    monkeypatch.setenv("OTHER", "mine")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (result,) = hold([who])
    assert result.error == "2bestmine"
    assert "BEST" not in os.environ
