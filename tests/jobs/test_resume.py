"""Spec J1: the same command again, after whatever happened or was changed in between."""

from __future__ import annotations

import json
import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import CbatchError, EngineError, UsageError
from tests.jobs.jobkit import Bench, prompts, read_rows, without_times
from tests.jobs.test_signals import Process
from tests.stub_engine import StubPlan


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def break_off(bench: Bench, *, at_step: int = 30, **options: Any) -> int:
    """Run until the engine fails, and return how many rows were finished by then."""
    bench.engine_options = {"fail_at_step": at_step}
    with pytest.raises(EngineError):
        bench.run(**options)
    bench.engine_options = {}
    journal = next(bench.path.rglob("*.journal.jsonl"))
    return journal.read_bytes().count(b'"result"')


def test_a_finished_job_says_so_and_does_nothing(bench: Bench) -> None:
    bench.write([*prompts(20), {"prompt": ""}])
    first = bench.run()
    before = {path: path.stat().st_mtime_ns for path in bench.path.iterdir()}
    again = bench.run()
    assert (first.status, again.status) == ("done", "unchanged")
    assert (again.rows, again.rows_ok, again.rows_error, again.exit_code) == (21, 20, 1, first.exit_code)
    assert {path: path.stat().st_mtime_ns for path in bench.path.iterdir()} == before
    assert len(bench.engines) == 1, "no model is loaded"


def test_appended_rows_run_alone(bench: Bench) -> None:
    bench.write(prompts(20))
    bench.run()
    earlier = bench.rows()
    bench.write(prompts(25))
    summary = bench.run()
    assert (summary.status, summary.rows, summary.rows_replayed) == ("done", 25, 20)
    assert bench.num_prompts_run == 25
    assert bench.rows()[:20] == earlier


def test_moved_and_removed_rows_keep_their_answers(bench: Bench) -> None:
    bench.write(prompts(10))
    bench.run()
    answers = {row["id"]: row["completion"] for row in bench.rows()}
    bench.write(prompts(10)[:3:-1])
    summary = bench.run()
    assert summary.rows_replayed == 6
    assert [row["id"] for row in bench.rows()] == [9, 8, 7, 6, 5, 4]
    assert [row["row"] for row in bench.rows()] == [0, 1, 2, 3, 4, 5]
    assert all(row["completion"] == answers[row["id"]] for row in bench.rows())
    assert bench.num_prompts_run == 10


def test_other_columns_of_a_row_are_not_part_of_it(bench: Bench) -> None:
    bench.write([{"prompt": "a", "note": "x"}])
    bench.run()
    bench.write([{"prompt": "b", "note": "x"}])
    assert bench.run().rows_replayed == 0


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_the_output_shows_the_columns_that_the_input_has_now(bench: Bench, output: str) -> None:
    bench.output = bench.path / output
    bench.write(prompts(4, note="x"))
    bench.run()
    answers = [row["completion"] for row in bench.rows()]
    bench.write(prompts(4, note="y", label=1))
    summary = bench.run()
    assert (summary.status, summary.rows_replayed, bench.num_prompts_run) == ("done", 4, 4)
    assert [(row["note"], row["label"]) for row in bench.rows()] == [("y", 1)] * 4
    assert [row["completion"] for row in bench.rows()] == answers
    assert bench.run().status == "unchanged"


def test_equal_prompts_in_another_order_keep_their_own_ids(bench: Bench) -> None:
    rows: list[dict[str, Any]] = [{"id": number, "prompt": "same", "temperature": 1.0} for number in range(5)]
    bench.write(rows)
    bench.run()
    answers = [row["completion"] for row in bench.rows()]
    bench.write(rows[::-1])
    bench.run()
    assert [row["id"] for row in bench.rows()] == [4, 3, 2, 1, 0]
    assert [row["completion"] for row in bench.rows()] == answers, "the first of equal rows has the same seed as before"
    assert bench.num_prompts_run == 5


def test_the_message_of_a_failed_row_names_the_place_where_it_stands_now(bench: Bench) -> None:
    bench.write(["{}", {"prompt": "never fits"}, "broken"])
    bench.run()
    bench.write([*prompts(2), "broken", {"prompt": "never fits"}])
    bench.run()
    messages = [row["error"]["message"].partition(": ")[0] for row in bench.rows() if row["error"]]
    assert [message.rpartition("/")[2] for message in messages] == ["in.jsonl:3", "in.jsonl:4"]


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"max_tokens": 3}},
        {"seed": 1},
        {"generation_config": "none"},
        {"model": "other"},
    ],
)
def test_changed_parameters_or_model_replay_no_old_answers(bench: Bench, change: dict[str, Any]) -> None:
    (bench.path / "other").mkdir()
    (bench.path / "other" / "config.json").write_text('{"another": 1}')
    if "model" in change:
        change = {"model": str(bench.path / "other")}
    bench.write(prompts(10))
    bench.run()
    summary = bench.run(**change)
    assert (summary.status, summary.rows_replayed) == ("done", 0)
    assert bench.num_prompts_run == 20
    back = bench.run()
    assert (back.status, back.rows_replayed) == ("done", 10), "the old answers are still in the journal"
    assert bench.num_prompts_run == 20


@pytest.mark.parametrize("change", [{"max_errors": 99}, {"error_tolerance": 1.0}, {"grace": 1.0}, {"limit": 10}])
def test_what_does_not_decide_over_answers_changes_nothing(bench: Bench, change: dict[str, Any]) -> None:
    bench.write(prompts(10))
    bench.run()
    assert bench.run(**change).status == "unchanged"


@pytest.mark.parametrize("change", [{"order": "completion"}, {"return_token_ids": False}])
def test_another_layout_is_put_together_without_running_anything(bench: Bench, change: dict[str, Any]) -> None:
    bench.write([{"prompt": f"p{n}", "max_tokens": 12 - n, "ignore_eos": True} for n in range(10)])
    bench.run(return_token_ids=True)
    before = bench.output.read_bytes()
    options = {"return_token_ids": True} | change
    summary = bench.run(**options)
    assert (summary.status, summary.rows_replayed) == ("done", 10)
    assert bench.output.read_bytes() != before
    assert bench.num_prompts_run == 10


def test_token_ids_asked_for_later_need_the_rows_again(bench: Bench) -> None:
    bench.write(prompts(5))
    bench.run()
    assert bench.run(return_token_ids=True).rows_replayed == 0
    assert all(row["completion_token_ids"] for row in bench.rows())


def test_restart_forgets_everything(bench: Bench) -> None:
    bench.write(prompts(10))
    bench.run()
    summary = bench.run(restart=True)
    assert (summary.status, summary.rows_replayed) == ("done", 0)
    assert bench.num_prompts_run == 20
    assert bench.run().status == "unchanged"


def test_failed_rows_stay_failed_until_they_are_retried(bench: Bench) -> None:
    rows = [{"prompt": "never fits"}, {"prompt": "fine"}, {"prompt": ""}, {"prompt": "never fits"}]
    bench.write(rows)
    bench.run()
    assert bench.run().status == "unchanged"
    for attempt in (2, 3):
        summary = bench.run(retry_errors=True)
        assert (summary.status, summary.rows_replayed, summary.rows_error) == ("done", 1, 3)
        assert [row["attempt"] for row in bench.rows()] == [attempt, 1, attempt, attempt]
    assert bench.num_prompts_run == 1
    assert [row["row"] for row in bench.rows()] == [0, 1, 2, 3]


def test_rows_of_the_journal_that_are_not_asked_for_are_counted(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(["broken", {"prompt": "never fits"}, *prompts(4)])
    bench.run()
    bench.run(retry_errors=True, quiet=False)
    assert "are not of this input" not in capsys.readouterr().err, "they are, and were run again"
    bench.run(limit=3, quiet=False)
    assert "3 finished rows in " in capsys.readouterr().err


def test_a_retry_that_works_takes_the_place_of_the_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write([{"prompt": "never fits now"}, *prompts(3)])
    assert bench.run().exit_code == 1
    monkeypatch.setattr("tests.stub_engine.StubEngine._refuses", lambda _self, _prompt: False)
    summary = bench.run(retry_errors=True)
    assert (summary.exit_code, summary.rows_error) == (0, 0)
    assert bench.rows()[0]["completion"]
    assert bench.run().status == "unchanged"


@pytest.mark.parametrize("limit", [{"on_overlong": "truncate-left"}, {"max_model_len": 4000}])
def test_rows_that_the_context_decided_over_run_again_under_another(bench: Bench, limit: dict[str, Any]) -> None:
    bench.engine_options = {"plan": StubPlan(max_model_len=50)}
    bench.write([{"prompt": "x" * 100}, {"prompt": "short"}])
    bench.run(on_overlong="truncate-right")
    if "max_model_len" in limit:
        bench.engine_options = {}
    options: dict[str, Any] = {"on_overlong": "truncate-right"} | limit
    assert bench.run(**options).rows_replayed == 1
    assert bench.num_prompts_run == 3


def test_a_run_that_broke_off_goes_on(bench: Bench) -> None:
    rows = prompts(100, temperature=1.0)
    bench.write(rows)
    whole = Bench(bench.path / "whole") if (bench.path / "whole").mkdir() is None else bench
    whole.write(rows)
    whole.run(model=str(bench.path / "model"))
    finished = break_off(bench)
    assert 0 < finished < 100
    summary = bench.run()
    assert summary.rows_replayed == finished
    assert without_times(bench.rows()) == without_times(whole.rows())


def test_a_lost_output_or_report_is_put_together_again(bench: Bench) -> None:
    bench.write(prompts(10))
    bench.run()
    rows, report = bench.rows(), bench.report()
    for name in ("out.jsonl", "out.jsonl.report.json"):
        (bench.path / name).unlink()
        assert bench.run().status == "done"
        assert bench.rows() == rows
        again = bench.report()
        assert again["settings"]
        for key in ("rows", "output_tokens", "generate_s", "latency", "settings", "hashes"):
            assert again[key] == report[key]
    assert bench.num_prompts_run == 10


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.jsonl"])
def test_a_pattern_that_matches_the_jobs_own_files_means_its_input(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    bench.write(prompts(3))
    monkeypatch.chdir(bench.path)
    for inputs, output in (((pattern,), str(bench.output)), ((str(bench.path / pattern),), "out.jsonl")):
        for shard in (None, "0/2", "1/2"):
            summary = bench.run(inputs=inputs, output=output, shard=shard)
            assert (summary.exit_code, summary.report["rows"]) == (0, 3 if shard is None else 1 + (shard == "1/2"))
    (bench.path / "other.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"other\.jsonl would be overwritten"):
        bench.run(inputs=(pattern,), output="other.jsonl", restart=True)


def test_a_pattern_does_not_mean_the_jobs_trace_either(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(prompts(3))
    monkeypatch.chdir(bench.path)
    for _ in range(2):
        summary = bench.run(inputs=("*.jsonl*",), output="out.jsonl", trace=True)
        assert (summary.exit_code, summary.report["rows"]) == (0, 3)
    assert (bench.path / "out.jsonl.trace.jsonl.gz").exists()


def test_an_output_of_unknown_origin_is_not_overwritten(bench: Bench) -> None:
    bench.write(prompts(3))
    bench.output.write_text("precious\n")
    with pytest.raises(UsageError, match=r"there is no journal of it at .*--restart replaces it"):
        bench.run()
    assert bench.output.read_text() == "precious\n"
    assert bench.run(restart=True).status == "done"
    assert len(bench.rows()) == 3


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("content", [b"", b"PAR1 and more", b"a note\n"])
def test_a_finished_output_that_was_cut_or_edited_is_not_called_finished(
    bench: Bench, output: str, content: bytes
) -> None:
    bench.output = bench.path / output
    bench.write(prompts(3))
    bench.run()
    rows = bench.rows()
    bench.output.write_bytes(content)
    with pytest.raises(UsageError, match=rf"is not as this job left it: {len(content)} bytes.*move it away"):
        bench.run()
    assert bench.output.read_bytes() == content
    bench.output.unlink()
    assert (bench.run().status, bench.num_prompts_run) == ("done", 3)
    assert bench.rows() == rows


def test_the_checkpoint_directory_holds_the_journal(bench: Bench) -> None:
    bench.write(prompts(50))
    folder = bench.path / "scratch"
    folder.mkdir()
    finished = break_off(bench, checkpoint_dir=str(folder))
    assert [path.name for path in folder.iterdir()] == ["out.jsonl.journal.jsonl"]
    assert bench.run(checkpoint_dir=str(folder)).rows_replayed == finished
    assert not (bench.path / "out.jsonl.journal.jsonl").exists()


@pytest.mark.parametrize("spelled", ["{}", "{}/.", "{}/scratch/.."])
def test_the_outputs_own_folder_may_be_the_checkpoint_directory(bench: Bench, spelled: str) -> None:
    (bench.path / "scratch").mkdir()
    bench.write(prompts(3))
    assert bench.run(checkpoint_dir=spelled.format(bench.path)).status == "done"
    assert bench.run().status == "unchanged"


def test_a_torn_journal_costs_the_torn_row_only(bench: Bench) -> None:
    bench.write([{"prompt": f"p{n} é\u2028漢"} for n in range(20)])
    bench.run()
    rows = bench.rows()
    journal = bench.path / "out.jsonl.journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-25])
    assert bench.run().rows_replayed == 19
    assert without_times(bench.rows()) == without_times(rows)
    journal.write_bytes(journal.read_bytes() + bytes(5000))
    assert bench.run().status == "unchanged"


def test_an_input_that_vanished_is_a_usage_error_and_costs_nothing(bench: Bench) -> None:
    file = bench.write(prompts(50))
    finished = break_off(bench)
    kept = file.rename(bench.path / "away")
    with pytest.raises(UsageError, match="no such input"):
        bench.run()
    kept.rename(file)
    assert bench.run().rows_replayed == finished


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_target_is_found_before_the_model_loads(bench: Bench) -> None:
    bench.write(prompts(3))
    folder = bench.path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(CbatchError, match="Permission denied"):
        bench.run(output=str(folder / "out.jsonl"))
    assert bench.engines == []


def test_figures_of_a_resumed_job_agree_with_its_output(bench: Bench) -> None:
    bench.write(prompts(100))
    finished = break_off(bench)
    bench.engine_options = {"step_s": 0.001}
    bench.run()
    report, rows = bench.report(), bench.rows()
    assert report["output_tokens"] == sum(row["completion_tokens"] for row in rows) == 800
    assert report["rows"] == 100
    assert report["session"]["rows"] == 100 - finished
    assert report["session"]["rows_replayed"] == finished
    assert report["session"]["output_tokens"] == 8 * (100 - finished)
    assert report["generate_s"] > report["session"]["generate_s"] > 0
    assert report["output_tokens_per_s"] == pytest.approx(report["output_tokens"] / report["generate_s"])
    assert report["session"]["number"] == 2


def test_rows_are_the_same_from_another_format(bench: Bench) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bench.write(prompts(10))
    bench.run()
    pq.write_table(pa.Table.from_pylist(prompts(10)), bench.path / "in.parquet")
    assert bench.run(inputs=(str(bench.path / "in.parquet"),)).rows_replayed == 10


def test_parquet_output_survives_a_break(bench: Bench) -> None:
    bench.output = bench.path / "out.parquet"
    bench.write(prompts(100))
    finished = break_off(bench)
    (bench.path / ".out.parquet.partial").write_bytes(b"PAR1 stub")
    assert bench.run().rows_replayed == finished
    assert len(read_rows(bench.output)) == 100
    assert not (bench.path / ".out.parquet.partial").exists()


def test_a_replayed_failure_counts_against_max_errors(bench: Bench) -> None:
    bench.write([*[{"prompt": ""}] * 5, *prompts(50)])
    for _ in range(2):
        with pytest.raises(CbatchError, match="--max-errors 5"):
            bench.run(max_errors=5)
    assert bench.run().rows == 55


def test_finished_rows_can_be_read_from_the_journal(bench: Bench) -> None:
    bench.write(prompts(100))
    finished = break_off(bench)
    text = (bench.path / "out.jsonl.journal.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    results = [line["result"] for line in lines if "key" in line]
    assert len(results) == finished
    assert all(result["completion"] for result in results)


def test_a_killed_job_keeps_its_clock(bench: Bench) -> None:
    """Templates print the time: rows of a resumed job are to have the prompts, and the shared prefix, of the others."""
    clock = {"chat_template_kwargs": {"clock": "%H:%M:%S.%f "}}
    bench.write([{"id": n, "messages": [{"role": "user", "content": f"{n}"}], **clock} for n in range(60)])
    log = bench.path / "started"
    process = Process(bench, environment={"STUB_LOG": str(log), "STUB_STEP_S": "0.01"})
    process.wait_for(lambda: process.journalled() > 8)
    process.send(signal.SIGKILL)
    process.end()
    num_before = log.read_text().count("\n")
    bench.engine_options = {"log": log}
    summary = bench.run()
    assert 8 < summary.rows_replayed < 60
    lines = log.read_text().splitlines()
    assert len(lines) > num_before
    assert len({line.split()[0] for line in lines}) == 1, "the prompts print different times"
    at = datetime.fromisoformat(bench.report()["clock"])
    assert at.strftime("%H:%M:%S.%f") in lines[0]
    bench.run(restart=True)
    assert bench.report()["clock"] > at.isoformat()
