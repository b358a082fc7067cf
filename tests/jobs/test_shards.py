"""Spec J3: parts of a job, where they come from, and how they become one output again."""

from __future__ import annotations

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import CbatchError, EngineError, InputError, UsageError
from cbatch.jobs.merge import merge_parts
from cbatch.jobs.paths import errors_path
from cbatch.jobs.shards import Shard, find_problem, mark_success, parse_shard
from tests.jobs.jobkit import Bench, prompts, read_rows, without_times
from tests.jobs.test_signals import Process

ROWS: list[Any] = [
    *prompts(7, temperature=1.0),
    *[{"prompt": "same", "temperature": 1.0}] * 3,
    "torn {",
    {"prompt": "", "completion": "theirs"},
    *[{"prompt": "same", "temperature": 1.0}] * 2,
    {"prompt": "last", "late": 5},
]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.write(ROWS)
    return bench


@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 16, 40])
def test_shards_are_contiguous_and_hold_every_row_once(count: int) -> None:
    for num_rows in (0, 1, 15, 16, 1000):
        parts = [Shard(index, count, "").rows(num_rows) for index in range(count)]
        assert [row for part in parts for row in part] == list(range(num_rows))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_merged_shards_are_the_whole_job(bench: Bench, suffix: str, count: int) -> None:
    whole = bench.path / f"whole{suffix}"
    bench.run(output=str(whole))
    bench.output = bench.path / f"out{suffix}"
    for index in reversed(range(count)):
        bench.run(shard=f"{index}/{count}")
    folder = bench.path / f"out{suffix}.parts"
    assert (folder / f"part-00000-of-{count:05}{suffix}").exists()
    assert (folder / "_SUCCESS").exists()
    summary = merge_parts(str(bench.output))
    assert (summary.exit_code, summary.num_parts, summary.rows) == (0, count, len(ROWS))
    assert without_times(bench.rows()) == without_times(read_rows(whole))
    report, other = bench.report(), json.loads((bench.path / f"whole{suffix}.report.json").read_text())
    for name in ("rows", "rows_ok", "rows_error", "output_tokens", "prompt_tokens", "errors", "first_error"):
        assert report[name] == other[name]
    assert len(report["parts"]) == count


def test_the_merged_report_has_the_figures_of_a_whole_job(bench: Bench) -> None:
    bench.write(prompts(6))
    whole = bench.path / "whole.jsonl"
    bench.run(output=str(whole), goodput_ttft=10.0)
    other = json.loads((bench.path / "whole.jsonl.report.json").read_text())
    for index in range(2):
        bench.run(shard=f"{index}/2", goodput_ttft=10.0)
    merge_parts(str(bench.output))
    report = bench.report()
    own = {"session", "started_at", "output", "output_wait_s", "generation_config", "clock", "host", "slurm", "trace"}
    own |= {"errors_file", "output_bytes", "columns_not_found"}
    own |= {"series", "idle_s", "starved_steps", "drafted_tokens", "accepted_tokens"}
    assert other.keys() - report.keys() <= own
    assert report["goodput_tokens_per_s"] > 0
    assert report["latency"]["ttft_s"]["count"] == 6
    for name in ("mean", "max"):
        rows = [row["ttft_s"] for row in bench.rows()]
        expected = sum(rows) / 6 if name == "mean" else max(rows)
        assert report["latency"]["ttft_s"][name] == pytest.approx(expected, rel=1e-5)
    assert sum(report["latency"]["ttft_s"]["histogram"]["counts"]) == 6
    assert report["latency"]["ttft_s"].keys() == other["latency"]["ttft_s"].keys()
    assert all(isinstance(value, str) and value for value in report["hashes"].values())
    assert report["hashes"].keys() == other["hashes"].keys()
    assert report["hashes"]["model"] == other["hashes"]["model"]


def test_a_shard_whose_rows_stayed_the_same_still_belongs_to_the_changed_job(bench: Bench) -> None:
    bench.write(prompts(6))
    for index in range(2):
        bench.run(shard=f"{index}/2")
    merge_parts(str(bench.output))
    content = bench.report()["hashes"]["content"]
    bench.write([*prompts(5), {"prompt": "another"}])
    assert [bench.run(shard=f"{index}/2").status for index in range(2)] == ["unchanged", "done"]
    merge_parts(str(bench.output))
    assert bench.num_prompts_run == 7
    assert [row["prompt"] for row in bench.rows()][5] == "another"
    assert bench.report()["hashes"]["content"] != content


def test_every_part_has_the_schema_of_the_whole(bench: Bench) -> None:
    import pyarrow.parquet as pq

    bench.output = bench.path / "out.parquet"
    for index in range(4):
        bench.run(shard=f"{index}/4")
    schemas = [pq.read_schema(path) for path in sorted((bench.path / "out.parquet.parts").glob("part-*.parquet"))]
    assert len(schemas) == 4
    assert all(schema == schemas[0] for schema in schemas)
    assert "late" in schemas[0].names


def test_success_is_marked_by_the_last_part_only(bench: Bench) -> None:
    mark = bench.path / "out.jsonl.parts" / "_SUCCESS"
    for index in (2, 0):
        bench.run(shard=f"{index}/3")
        assert not mark.exists()
    bench.run(shard="1/3")
    assert mark.exists()
    assert bench.run(shard="0/3").status == "unchanged"
    assert mark.exists()


def test_shards_that_end_at_the_same_moment_mark_success_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(3):
        bench.run(shard=f"{index}/3")
    (bench.path / "out.jsonl.parts" / "_SUCCESS").unlink()
    all_found = threading.Barrier(4)

    def find(output: Path, count: int) -> str | None:
        problem = find_problem(output, count)
        all_found.wait(timeout=60)
        return problem

    monkeypatch.setattr("cbatch.jobs.shards.find_problem", find)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            list(pool.map(lambda _: mark_success(bench.output, 3), range(4)))
            (bench.path / "out.jsonl.parts" / "_SUCCESS").unlink()


def test_a_killed_shard_goes_on_where_it_was(bench: Bench) -> None:
    bench.write(prompts(200))
    bench.engine_options = {"fail_at_step": 30}
    with pytest.raises(EngineError):
        bench.run(shard="1/2")
    bench.engine_options = {}
    journal = bench.path / "out.jsonl.parts" / "part-00001-of-00002.jsonl.journal.jsonl"
    num_finished = journal.read_bytes().count(b'"result"')
    assert 0 < num_finished <= 24
    assert bench.run(shard="1/2").rows_replayed == num_finished
    assert bench.engines[-1].num_started == 100 - num_finished


def test_one_shard_may_lie_beyond_the_rows(bench: Bench) -> None:
    bench.write(prompts(2))
    summaries = [bench.run(shard=f"{index}/4") for index in range(4)]
    assert sorted(summary.rows for summary in summaries) == [0, 0, 1, 1]
    assert merge_parts(str(bench.output)).rows == 2


@pytest.mark.parametrize("given", ["out.jsonl", "out.jsonl.parts", "out.jsonl.parts/"])
def test_a_job_is_named_by_its_output_or_its_parts(bench: Bench, given: str) -> None:
    bench.run(shard="0/1")
    assert merge_parts(str(bench.path / given.rstrip("/")) + "/" * given.endswith("/")).output == bench.output


def break_part(folder: Path, what: str) -> None:
    part = folder / "part-00001-of-00003.jsonl"
    report = part.with_name(part.name + ".report.json")
    lines = part.read_bytes().splitlines(keepends=True)
    if what == "missing":
        part.unlink()
    elif what == "no report":
        report.unlink()
    elif what == "a row less":
        part.write_bytes(b"".join(lines[:-1]))
    elif what == "a row twice":
        part.write_bytes(b"".join([lines[0], *lines]))
    elif what == "swapped":
        part.write_bytes(b"".join(lines[::-1]))
    elif what == "another job's":
        (folder / "part-00000-of-00004.jsonl").write_bytes(b"")
    elif what == "a torn line":
        part.write_bytes(b"".join(lines)[:-20])
    elif what == "no last newline":
        part.write_bytes(b"".join(lines)[:-1])
    elif what == "a line of something else":
        part.write_bytes(b"".join([b"[]\n", *lines[1:]]))
    elif what == "bytes that are no text":
        part.write_bytes(b"".join([b"\xff\n", *lines[1:]]))
    elif what == "an odd report":
        report.write_text('{"shard": {"index": 1, "count": 3, "first_row": 5, "all_rows": "15", "job": ""}}')
    elif what == "a report without figures":
        kept = ("shard", "rows", "rows_error", "hashes", "row_column")
        report.write_text(json.dumps({name: json.loads(report.read_text())[name] for name in kept}))
    elif what == "of more rows":
        text = report.read_text()
        report.write_text(text.replace('"all_rows": 15', '"all_rows": 18').replace('"first_row": 5', '"first_row": 6'))


@pytest.mark.parametrize(
    "what",
    [
        "missing",
        "no report",
        "an odd report",
        "a report without figures",
        "a row less",
        "a row twice",
        "swapped",
        "a torn line",
        "no last newline",
        "a line of something else",
        "bytes that are no text",
        "another job's",
        "of more rows",
    ],
)
def test_parts_that_are_not_one_whole_are_refused_by_name(bench: Bench, what: str) -> None:
    for index in range(3):
        bench.run(shard=f"{index}/3")
    break_part(bench.path / "out.jsonl.parts", what)
    with pytest.raises(InputError, match=r"part-00001-of-00003|parts of different jobs: of 3, 4|lacks 'rows_ok'"):
        merge_parts(str(bench.output))
    assert not bench.output.exists()


@pytest.mark.parametrize("what", ["cut", "garbage", "a row less", "no column"])
def test_damaged_parquet_parts_are_refused_by_name(bench: Bench, what: str) -> None:
    import pyarrow.parquet as pq

    bench.output = bench.path / "out.parquet"
    for index in range(3):
        bench.run(shard=f"{index}/3")
    part = bench.path / "out.parquet.parts" / "part-00002-of-00003.parquet"
    table = pq.read_table(part)
    if what == "cut":
        part.write_bytes(part.read_bytes()[:-30])
    elif what == "garbage":
        part.write_bytes(b"PAR1 and nothing more")
    else:
        pq.write_table(table.slice(0, 4) if what == "a row less" else table.drop_columns(["row"]), part)
    with pytest.raises(InputError, match=r"part-00002-of-00003.*run that shard again"):
        merge_parts(str(bench.output))
    assert not bench.output.exists()


def test_a_part_of_another_model_is_refused_and_unmarks_success(bench: Bench) -> None:
    for index in range(2):
        bench.run(shard=f"{index}/2")
    (bench.path / "other").mkdir()
    (bench.path / "other" / "config.json").write_text('{"another": 1}')
    bench.run(shard="1/2", model=str(bench.path / "other"))
    assert not (bench.path / "out.jsonl.parts" / "_SUCCESS").exists()
    with pytest.raises(InputError, match="another job than the first part"):
        merge_parts(str(bench.output))


@pytest.mark.parametrize("change", ["parameters", "input", "template"])
def test_a_part_of_another_job_is_refused(bench: Bench, change: str) -> None:
    """As after an array of which one task ran again with something changed: the row numbers alone would fit."""
    for index in range(2):
        bench.run(shard=f"{index}/2")
    options: dict[str, object] = {"sampling": {"max_tokens": 2}} if change == "parameters" else {}
    if change == "template":
        options = {"template": "{{prompt}}!"}
    if change == "input":
        bench.write([{"id": n, "prompt": f"another {n}"} for n in range(15)])
    bench.run(shard="1/2", **options)
    with pytest.raises(InputError, match="another job than the first part"):
        merge_parts(str(bench.output))
    assert not bench.output.exists()


def test_an_output_of_unknown_origin_is_not_merged_over(bench: Bench) -> None:
    for index in range(2):
        bench.run(shard=f"{index}/2")
    bench.output.write_text("precious\n")
    with pytest.raises(UsageError, match=r"of unknown origin \(move it away\)"):
        merge_parts(str(bench.output))
    assert bench.output.read_text() == "precious\n"
    bench.output.unlink()
    assert merge_parts(str(bench.output)).rows == merge_parts(str(bench.output)).rows == len(ROWS)
    (bench.path / "out.jsonl.report.json").unlink()  # as where a merge is killed between its two files
    assert merge_parts(str(bench.output)).rows == len(ROWS)


def test_nothing_to_merge_is_a_usage_error(bench: Bench) -> None:
    with pytest.raises(UsageError, match="has no parts"):
        merge_parts(str(bench.path / "never.jsonl"))


def test_a_stream_cannot_be_split(bench: Bench) -> None:
    with pytest.raises(UsageError, match="can be read only once"):
        bench.run(inputs=("-",), shard="0/2")


def test_completion_order_cannot_be_merged(bench: Bench) -> None:
    with pytest.raises(UsageError, match="--shard needs the rows in the order of the input"):
        bench.run(order="completion", shard="0/2")


@pytest.mark.parametrize("text", ["", "3", "1/0", "a/b", "-1/4", "1/2/3", "SLURM", "1.0/2", "1/100000"])
def test_a_malformed_shard_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="shard"):
        parse_shard(text, {})


def test_shards_are_counted_from_zero() -> None:
    assert parse_shard("0/4", {}).index == 0
    with pytest.raises(UsageError, match=re.escape("counted from 0, so the last of 4 is 3/4")):
        parse_shard("4/4", {})


def array(task: int, low: int, high: int, step: int, count: int) -> dict[str, str]:
    names = ("ID", "MIN", "MAX", "STEP", "COUNT")
    return {
        f"SLURM_ARRAY_TASK_{name}": str(value)
        for name, value in zip(names, (task, low, high, step, count), strict=True)
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (array(0, 0, 15, 1, 16), (0, 16)),
        (array(16, 1, 16, 1, 16), (15, 16)),
        (array(30, 10, 40, 10, 4), (2, 4)),
        (array(5, 1, 15, 4, 4), (1, 4)),
        ({**array(3, 0, 3, 1, 4), "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, (1, 8)),
    ],
)
def test_slurm_says_which_shard_this_is(environment: dict[str, str], expected: tuple[int, int]) -> None:
    shard = parse_shard("slurm", environment)
    assert (shard.index, shard.count) == expected
    assert "Slurm" in shard.source


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_ARRAY_TASK_ID": "3"},
        array(7, 0, 7, 1, 3),
        array(4, 1, 7, 2, 4),
        {"SLURM_PROCID": "1"},
        {"SLURM_PROCID": "9", "SLURM_NTASKS": "8"},
    ],
)
def test_a_slurm_environment_that_does_not_say_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        parse_shard("slurm", environment)


def test_the_environment_is_not_asked_unless_told_to(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in array(1, 0, 3, 1, 4).items():
        monkeypatch.setenv(name, value)
    assert bench.run().rows == len(ROWS)
    assert bench.run(shard="slurm").rows == len(Shard(1, 4, "").rows(len(ROWS)))


def test_the_log_says_what_was_used(bench: Bench) -> None:
    process = Process(bench, environment={**array(1, 0, 3, 1, 4)}, shard="slurm")
    _, errors = process.end()
    assert "Slurm array task 1 of 0 to 3 by 1: part 1 of 4" in errors
    assert "rows 3 to 6 of 15" in errors


def test_a_requeued_task_resumes_and_its_restart_is_recorded(bench: Bench) -> None:
    bench.write(prompts(400))
    environment = {**array(0, 0, 1, 1, 2), "SLURM_JOB_ID": "77", "STUB_STEP_S": "0.01"}
    first = Process(bench, environment=environment, shard="slurm")
    journal = bench.path / "out.jsonl.parts" / "part-00000-of-00002.jsonl.journal.jsonl"
    first.wait_for(lambda: journal.exists() and journal.read_bytes().count(b'"result"') > 20)
    first.send(signal.SIGKILL)
    first.process.communicate()
    again = Process(bench, environment=environment | {"SLURM_RESTART_COUNT": "1"}, shard="slurm")
    code, errors = again.end()
    assert code == 0
    assert "finished rows found" in errors
    report = json.loads(journal.with_name("part-00000-of-00002.jsonl.report.json").read_text())
    assert report["slurm"] == {"SLURM_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "1"}
    assert report["session"]["rows_replayed"] > 20


def run_requests(bench: Bench) -> None:
    """Run a batch of requests in three shards, each with failures."""
    requests = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"{n}"}], **({"temperature": -1} if n % 4 == 0 else {})},
        }
        for n in range(10)
    ]
    bench.write(requests)
    for index in range(3):
        bench.run(shard=f"{index}/3")


def test_openai_shards_merge_answers_and_errors(bench: Bench) -> None:
    run_requests(bench)
    merge_parts(str(bench.output))
    errors = read_rows(bench.path / "out.jsonl.errors.jsonl")
    assert [row["custom_id"] for row in errors] == ["r0", "r4", "r8"]
    assert [row["custom_id"] for row in bench.rows()] == [f"r{n}" for n in range(10) if n % 4]


@pytest.mark.parametrize("kept", [None, 0, -1])
def test_failures_that_are_lost_are_not_merged_away(bench: Bench, kept: int | None) -> None:
    run_requests(bench)
    part = bench.path / "out.jsonl.parts" / "part-00001-of-00003.jsonl"
    failures = errors_path(part)
    content = failures.read_bytes()
    if kept is None:
        failures.unlink()
    else:
        failures.write_bytes(content[:kept])
    with pytest.raises(InputError, match=r"part-00001-of-00003\.jsonl\.errors"):
        merge_parts(str(bench.output))
    assert not bench.output.exists()
    if kept is None:
        assert bench.run(shard="1/3").status == "done"
        assert failures.read_bytes() == content
        assert merge_parts(str(bench.output)).rows == 10


def test_a_merge_into_a_held_output_is_refused(bench: Bench) -> None:
    from cbatch.jobs.lock import JobLock

    bench.run(shard="0/1")
    with JobLock(bench.path / "out.jsonl.lock"), pytest.raises(CbatchError, match="another run holds"):
        merge_parts(str(bench.output))
