"""The step trace of a job: what is in it, what a kill leaves of it, and that no trace is worth a job."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import EngineError, OutputError, UsageError
from cbatch.io.gziplog import GzipLog, read_log
from cbatch.jobs.totals import BINS_PER_DECADE, Totals
from tests.cli.clikit import STUB, run_job, write_input
from tests.jobs.jobkit import Bench, prompts


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def trace_of(bench: Bench) -> Path:
    return bench.path / "out.jsonl.trace.jsonl.gz"


def lines_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The sessions, and the steps."""
    lines = list(read_log(path))
    return [line for line in lines if "session" in line], [line for line in lines if "session" not in line]


def test_a_trace_has_its_session_and_every_step(bench: Bench) -> None:
    bench.write(prompts(20))
    bench.run(trace=True)
    (session,), steps = lines_of(trace_of(bench))
    assert (session["session"], session["settings"], session["layers"]) == (
        1,
        {"max_requests_per_batch": 8},
        [[None, 1]],
    )
    assert session["mode"] == "continuous+chunked"
    assert len(steps) == bench.report()["steps"]
    assert steps[0]["at_s"] == 0
    assert [step["at_s"] for step in steps] == sorted(step["at_s"] for step in steps)
    finished = [event[0] for step in steps for event in step["events"] if event[2] == "finished"]
    assert sorted(finished) == list(range(20))
    assert bench.report()["trace"] == trace_of(bench).name
    assert gzip.decompress(trace_of(bench).read_bytes()).count(b"\n") == len(steps) + 1


def test_without_the_option_there_is_none_and_nobody_watches(bench: Bench) -> None:
    bench.write(prompts(3))
    bench.run()
    assert not trace_of(bench).exists()
    assert bench.engines[0].observer is None
    assert bench.report()["trace"] is None
    assert {"series", "idle_s", "starved_steps", "output_wait_s"} <= set(bench.report())


def test_a_resumed_job_goes_on_with_its_trace(bench: Bench) -> None:
    bench.write(prompts(40))
    bench.engine_options = {"fail_at_step": 12}
    with pytest.raises(EngineError):
        bench.run(trace=True)
    bench.engine_options = {}
    assert [session["session"] for session in lines_of(trace_of(bench))[0]] == [1]
    with trace_of(bench).open("ab") as file:
        file.write(b"\x1f\x8b torn")
    bench.run(trace=True)
    sessions, steps = lines_of(trace_of(bench))
    assert [session["session"] for session in sessions] == [1, 2]
    finished = [event[0] for step in steps for event in step["events"] if event[2] == "finished"]
    assert set(finished) == set(range(40))


def test_a_restart_forgets_the_trace(bench: Bench) -> None:
    bench.write(prompts(3))
    bench.run(trace=True)
    bench.run(restart=True)
    assert not trace_of(bench).exists()
    bench.run(restart=True, trace=True)
    assert [session["session"] for session in lines_of(trace_of(bench))[0]] == [1]


def test_a_killed_run_leaves_its_trace_up_to_the_last_second(bench: Bench) -> None:
    folder = bench.path / "job"
    folder.mkdir()
    write_input(folder, *prompts(400))
    command = [*STUB, "run", "in.jsonl", "--model", "model", "-o", "out.jsonl", "--trace", "-q"]
    process = subprocess.Popen(command, cwd=folder, env={"STUB_STEP_S": "0.01", "PATH": "/usr/bin:/bin"})
    path, deadline = folder / "out.jsonl.trace.jsonl.gz", time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and len(lines_of(path)[1]) > 50):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    sessions, steps = lines_of(path)
    assert (len(sessions), len(steps) > 50) == (1, True)


def test_a_trace_that_cannot_be_written_ends_and_the_job_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(log: GzipLog, lines: Iterable[bytes]) -> None:
        raise OutputError(f"cannot write {log.path}: No space left on device")

    monkeypatch.setattr(GzipLog, "append", refuse)
    bench.write(prompts(20))
    summary = bench.run(trace=True, quiet=False)
    assert (summary.status, summary.rows_ok) == ("done", 20)
    assert capsys.readouterr().err.count("the trace is not complete") == 1


def test_a_trace_overwrites_no_input(bench: Bench) -> None:
    bench.write(prompts(1), name=trace_of(bench).name)
    with pytest.raises(UsageError, match="would be overwritten"):
        bench.run(inputs=(str(trace_of(bench)),), trace=True)


def test_the_command_line_has_it(tmp_path: Path) -> None:
    write_input(tmp_path, *prompts(3))
    assert run_job(tmp_path, "--trace").returncode == 0
    assert len(lines_of(tmp_path / "out.jsonl.trace.jsonl.gz")[0]) == 1
    (tmp_path / "out.jsonl.trace.jsonl.gz").unlink()
    (tmp_path / "out.jsonl.trace.jsonl.gz").mkdir()
    done = run_job(tmp_path, "--trace", "--restart")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "out.jsonl.trace.jsonl.gz" in done.stderr


def test_latencies_are_counted_in_bins_that_add_up() -> None:
    import numpy as np

    totals = Totals(4)
    for name, values in (("ttft_s", [0.0, 0.45, 0.46, 12.0]), ("e2e_s", [3.0])):
        for value in values:
            totals._latencies[name][totals._counts[name]] = value
            totals._counts[name] += 1
    table = totals.percentiles()
    histogram = table["ttft_s"]["histogram"]
    filled = {histogram["first_bin"] + i: count for i, count in enumerate(histogram["counts"]) if count}
    assert sum(filled.values()) == 4
    assert min(filled) == -60, "what is too short for a bin of its own is in the first"
    for value, count in ((0.45, 2), (12.0, 1)):
        assert filled[int(np.floor(np.log10(value) * BINS_PER_DECADE))] == count
    assert table["e2e_s"]["histogram"] == {"first_bin": 4, "counts": [1]}
    assert "histogram" not in table["queue_s"]
    assert json.dumps(table)
