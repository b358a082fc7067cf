"""Spec I1 to I7 over whole jobs, with a stub engine: what goes in, what comes out, and what does not end a run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch.config import SamplingParams
from cbatch.engine.request import Prompt
from cbatch.errors import CbatchError, EngineError, InputError, OutputError, UsageError
from cbatch.io.columns import result_columns
from cbatch.io.sources import open_source
from cbatch.jobs.counting import count_rows
from tests.jobs.jobkit import Bench, prompts, read_rows, without_times
from tests.stub_engine import StubEngine, StubPlan, StubTokenizer, expected_text


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Any:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} hangs"


def expected(text: str, **sampling: Any) -> str:
    return expected_text(Prompt(0, StubTokenizer().encode(text), SamplingParams(**sampling)))


def test_every_row_comes_back_in_order_with_its_own_answer(bench: Bench) -> None:
    bench.write([{"id": n, "prompt": f"nonce {n}", "max_tokens": 1 + n * 7 % 13} for n in range(300)])
    summary = bench.run()
    rows = bench.rows()
    assert (summary.status, summary.exit_code, summary.rows, summary.rows_ok) == ("done", 0, 300, 300)
    assert [row["row"] for row in rows] == [row["id"] for row in rows] == list(range(300))
    assert [row["completion"] for row in rows] == [
        expected(f"nonce {n}", max_tokens=1 + n * 7 % 13) for n in range(300)
    ]


def test_the_columns_are_the_inputs_and_then_ours(bench: Bench) -> None:
    bench.write([{"id": "007", "prompt": "a", "nested": {"x": [1, None]}}])
    bench.run()
    (row,) = bench.rows()
    assert list(row) == ["id", "prompt", "nested", *(column.name for column in result_columns(()))]
    assert (row["id"], row["nested"]) == ("007", {"x": [1, None]})
    assert row["ttft_s"] == pytest.approx(row["queue_s"] + row["prefill_s"])
    assert row["scheduled_at"].endswith("Z")
    assert (row["error"], row["finish_reason"], row["attempt"], row["completions"]) == (None, "stop", 1, None)


def test_a_column_named_like_ours_keeps_its_name(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, {"prompt": "b", "completion": "theirs", "cbatch_row": 5}])
    bench.run()
    first, second = bench.rows()
    assert second["completion"] == "theirs"
    assert second["cbatch_completion"] == expected("b")
    assert first["cbatch_completion"] == expected("a")
    assert second["cbatch_row"] == 5
    assert second["row"] == 1


BAD_LINES = [
    '{"prompt": "torn',
    "[1, 2]",
    "\xff",
    '{"prompt": ""}',
    '{"prompt": 0}',
    '{"prompt": null}',
    '{"other": 1}',
    '{"messages": []}',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
    '{"prompt": "x", "temperature": "hot"}',
    '{"prompt": "x", "temprature": 1}',
    '{"prompt": "x", "n": 0}',
    '{"prompt_token_ids": [-1]}',
    '{"prompt": "a\\ud83db"}',
    '{"prompt": "never fits"}',
    json.dumps({"prompt": "long " * 2000}),
]


def test_a_bad_row_never_ends_a_run(bench: Bench) -> None:
    lines: list[Any] = []
    for number, line in enumerate(BAD_LINES):
        lines += [{"prompt": f"good {number}"}, line]
    bench.write(lines)
    summary = bench.run()
    rows = bench.rows()
    assert (summary.exit_code, summary.rows, summary.rows_error) == (1, 2 * len(BAD_LINES), len(BAD_LINES))
    assert [row["row"] for row in rows] == list(range(len(rows)))
    for number, good in enumerate(rows[::2]):
        assert good["completion"] == expected(f"good {number}")
        assert good["error"] is None
    for number, bad in enumerate(rows[1::2]):
        assert bad["finish_reason"] == "error"
        assert bad["completion"] is None
        assert set(bad["error"]) == {"code", "message"}
        assert bad["error"]["message"].startswith(f"{bench.path / 'in.jsonl'}:{2 * number + 2}: ")
    codes = [row["error"]["code"] for row in rows[1::2]]
    assert codes[3:6] == ["empty_prompt", "bad_prompt", "empty_prompt"]
    assert codes[-3:] == ["lone_surrogate", "does_not_fit", "prompt_too_long"]


def test_blank_lines_are_no_rows_and_line_numbers_stay_physical(bench: Bench) -> None:
    bench.write(["", '{"prompt": "a"}', "   ", "\r", '{"prompt": ""}', "", ""])
    bench.run()
    rows = bench.rows()
    assert [row["row"] for row in rows] == [0, 1]
    assert "in.jsonl:5:" in rows[1]["error"]["message"]


def test_equal_ids_and_equal_rows_each_have_an_answer(bench: Bench) -> None:
    bench.write([{"id": 1, "prompt": "same", "temperature": 1.0}] * 3 + [{"id": "1", "prompt": "same"}])
    bench.run()
    rows = bench.rows()
    assert [row["id"] for row in rows] == [1, 1, 1, "1"]
    assert len({row["completion"] for row in rows[:3]}) == 3, "occurrences are seeded apart"
    assert rows[3]["completion"] == expected("same")


def test_numbers_text_and_keys_come_back_exactly(bench: Bench) -> None:
    row = '{"prompt": "p", "big": 98765432109876543210, "exact": 9007199254740993, "date": "2024-01-01", '
    row += '"x": "a\\u2028b"}'
    bench.write([row, '{"prompt": "q", "id": "\\udc00"}'])
    bench.run()
    first, second = bench.rows()
    assert (first["big"], first["exact"], first["date"], first["x"]) == (
        98765432109876543210,
        9007199254740993,
        "2024-01-01",
        "a\u2028b",
    )
    assert second["error"] is None
    assert len(bench.output.read_text(encoding="utf-8").splitlines()) == 2


def test_seeds_do_not_depend_on_order_batch_or_neighbours(bench: Bench) -> None:
    rows = [{"prompt": f"p{n}", "temperature": 1.0, **({"seed": 42} if n == 2 else {})} for n in range(5)]
    bench.write(rows)
    bench.run(seed=7)
    first = {row["prompt"]: row["completion"] for row in bench.rows()}
    bench.write(rows[::-1])
    bench.engine_options = {"plan": StubPlan(max_requests_per_batch=1)}
    bench.run(seed=7, restart=True)
    assert {row["prompt"]: row["completion"] for row in bench.rows()} == first
    assert first["p2"] == expected("p2", temperature=1.0, seed=42)
    bench.run(seed=8)
    changed = {row["prompt"]: row["completion"] for row in bench.rows()}
    assert changed["p2"] == first["p2"]
    assert changed["p1"] != first["p1"]


def test_the_model_defaults_count_unless_told_otherwise(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.engine_options = {"generation_defaults": {"temperature": 1.0}}
    bench.write([{"prompt": "p"}, {"prompt": "p", "temperature": 0}])
    bench.run(quiet=False)
    sampled, greedy = bench.rows()
    assert sampled["completion"] != expected("p")
    assert greedy["completion"] == expected("p")
    assert bench.report()["generation_config"] == {"temperature": 1.0}
    assert "from the model's generation config, where neither row nor option says: temperature 1.0" in (
        capsys.readouterr().err
    )
    bench.run(quiet=False, generation_config="none", sampling={"max_tokens": 3})
    assert bench.rows()[0]["completion"] == expected("p", max_tokens=3)
    assert bench.report()["generation_config"] == {}
    assert "from the model's generation config" not in capsys.readouterr().err


def test_the_engine_is_told_what_rows_ask_for_before_the_first_step(bench: Bench) -> None:
    bench.write(["torn {", *prompts(2, regex="[a-z]+")])
    bench.engine_options["generation_defaults"] = {"temperature": 0.5}
    bench.run(sampling={"max_tokens": 9})
    (params,) = bench.engines[0].prepared
    assert (params.regex, params.temperature, params.max_tokens) == ("[a-z]+", 0.5, 9)


def test_counts_add_up_in_columns_and_report(bench: Bench) -> None:
    lengths = [1, 5, 8, 20]
    rows = [{"prompt": f"p{n}", "max_tokens": n, "ignore_eos": True} for n in lengths]
    bench.write([*rows, {"prompt": "by itself"}, {"prompt": "", "max_tokens": 3}])
    bench.run(return_token_ids=True)
    rows = bench.rows()
    assert [row["completion_tokens"] for row in rows] == [*lengths, 8, None]
    assert all(row["completion_tokens"] == len(row["completion_token_ids"]) for row in rows[:5])
    assert [row["finish_reason"] for row in rows] == ["length"] * 4 + ["stop", "error"]
    report = bench.report()
    assert report["output_tokens"] == sum(row["completion_tokens"] or 0 for row in rows) == 42
    assert report["prompt_tokens"] == sum(row["prompt_tokens"] or 0 for row in rows)
    assert report["output_tokens_per_s"] == pytest.approx(42 / report["generate_s"])
    assert (report["rows"], report["rows_ok"], report["rows_error"]) == (6, 5, 1)
    assert report["errors"] == {"empty_prompt": 1}


def test_the_report_has_its_keys_and_its_percentiles_are_the_columns(bench: Bench) -> None:
    import numpy as np

    bench.engine_options = {"step_s": 0.001}
    bench.write([*prompts(40), {"prompt": "one", "max_tokens": 1}, {"prompt": 3}])
    bench.run(goodput_ttft=1000.0)
    report, rows = bench.report(), [row for row in bench.rows() if row["error"] is None]
    keys = """rows rows_ok rows_error load_s generate_s wall_s prompt_tokens cached_tokens computed_tokens
        recomputed_tokens output_tokens output_tokens_per_s goodput_tokens_per_s latency steps preemptions offloads
        soft_resets drafted_tokens accepted_tokens kv_waste_fraction peak_rss_bytes settings versions seeds hashes"""
    assert set(keys.split()) <= set(report)
    assert report["load_s"] == 0.25
    assert report["settings"]["max_requests_per_batch"] == {"value": 8, "reason": "stub"}
    for name in ("queue_s", "ttft_s", "e2e_s"):
        values = [row[name] for row in rows]
        assert report["latency"][name]["count"] == len(rows) == 41
        for rank in (50, 90, 99):
            assert report["latency"][name][f"p{rank}"] == pytest.approx(np.percentile(values, rank), rel=1e-4)
    assert report["latency"]["itl_mean_s"]["count"] == 40, "a row of one token has no time between tokens"
    assert report["goodput_tokens_per_s"] == report["output_tokens_per_s"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_job_that_is_restarted_keeps_nothing_of_its_output_or_report(bench: Bench, count: int) -> None:
    """Entries of the same rows may lie where the old ones lay: then only the report tells what the output is of."""
    bench.write(prompts(count))
    bench.run()
    for _ in range(4):
        before = [row["scheduled_at"] for row in bench.rows()]
        bench.run(restart=True)
        assert [row["scheduled_at"] for row in bench.rows()] != before


def test_goodput_counts_the_rows_that_keep_their_targets(bench: Bench) -> None:
    bench.write(prompts(5))
    bench.run()
    assert bench.report()["goodput_tokens_per_s"] is None
    bench.run(goodput_itl=0.001, restart=True)
    assert bench.report()["goodput_tokens_per_s"] == 0.0


def test_the_completion_order_holds_the_same_rows(bench: Bench) -> None:
    rows = [{"prompt": f"p{n}", "max_tokens": 20 - n, "ignore_eos": True} for n in range(20)]
    bench.write(rows)
    bench.run()
    in_order = bench.rows()
    bench.run(order="completion", restart=True)
    finished = bench.rows()
    assert [row["row"] for row in finished] != list(range(20))
    assert without_times(sorted(finished, key=lambda row: row["row"])) == without_times(in_order)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_no_rows_and_only_bad_rows_are_outputs_too(bench: Bench, suffix: str) -> None:
    bench.output = bench.path / f"out{suffix}"
    bench.write([])
    assert bench.run().exit_code == 0
    assert bench.rows() == []
    bench.write([{"prompt": ""}] * 3)
    assert bench.run().exit_code == 1
    assert [row["error"]["code"] for row in bench.rows()] == ["empty_prompt"] * 3
    assert bench.engines == [], "no row needs the model"


def test_parquet_has_one_schema_whatever_the_rows_are(bench: Bench) -> None:
    bench.output = bench.path / "out.parquet"
    schemas = []
    for rows in ([], [{"prompt": ""}], [{"prompt": "fine"}], [{"prompt": "fine"}, {"prompt": ""}]):
        bench.write(rows)
        bench.run(restart=True)
        schema = pq.read_schema(bench.output)
        schemas.append([schema.field(column.name) for column in result_columns(())])
    assert all(schema == schemas[0] for schema in schemas)


def test_nulls_in_the_first_thousand_rows_lock_no_type(bench: Bench) -> None:
    bench.output = bench.path / "out.parquet"
    rows: list[dict[str, Any]] = [{"prompt": f"p{n}", "system": None} for n in range(1200)]
    bench.write([*rows, {"prompt": "last", "system": "be brief"}])
    bench.run()
    assert bench.rows()[-1]["system"] == "be brief"


def test_mixed_types_and_missing_columns_pass_through(bench: Bench) -> None:
    values = [1, "a", {}, [], 3.5, None]
    bench.write([{"prompt": f"p{n}", "meta": value} for n, value in enumerate(values)] + [{"prompt": "none"}])
    bench.run()
    assert [row.get("meta") for row in bench.rows()] == [*values, None]
    bench.output = bench.path / "out.parquet"
    assert bench.run().exit_code == 0
    assert len(bench.rows()) == len(values) + 1


@pytest.mark.parametrize("inputs", [("in.jsonl",), ("in.parquet",), ("in.parquet", "in.jsonl")])
def test_numbers_that_json_lacks_are_null_and_said(
    bench: Bench, inputs: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(['{"prompt": "a", "v": NaN}', '{"prompt": "b", "v": [1, {"w": 1e400}]}', '{"prompt": "c", "v": 1}'])
    columns = {"prompt": ["a", "b", "c"], "v": pa.array([float("nan"), float("-inf"), 1.0])}
    pq.write_table(pa.table(columns), bench.path / "in.parquet")
    summary = bench.run(inputs=tuple(str(bench.path / name) for name in inputs), quiet=False)
    assert summary.report["rows_nulled"] == 2 * len(inputs)
    assert f"{2 * len(inputs)} rows hold numbers that JSON lacks (NaN, infinities): null" in capsys.readouterr().err
    expected = {"in.jsonl": [None, [1, {"w": None}], 1], "in.parquet": [None, None, 1.0]}
    assert [row["v"] for row in bench.rows()] == [value for name in inputs for value in expected[name]]


def test_parquet_keeps_the_numbers_that_json_lacks(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.output = bench.path / "out.parquet"
    source = bench.path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "v": pa.array([float("-inf")])}), source)
    summary = bench.run(inputs=(str(source),), quiet=False)
    assert (summary.report["rows_nulled"], bench.rows()[0]["v"]) == (0, float("-inf"))
    assert "JSON lacks" not in capsys.readouterr().err


def test_a_row_counts_as_the_bar_counts_it(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, "", "  \t\r", "broken", *prompts(2), ""])
    (bench.path / "last.jsonl").write_text('\n{"prompt": "z"}\n\n{"prompt": "no newline"}')
    inputs = (str(bench.path / "in.jsonl"), str(bench.path / "last.jsonl"))
    source = open_source(inputs)
    assert [count_rows(part) for part in source.parts] == [4, 2]
    assert bench.run(inputs=inputs).rows == 6


def test_parquet_in_and_out_keeps_the_declared_types(bench: Bench) -> None:
    import pyarrow as pa

    table = pa.table(
        {
            "prompt": ["a", "b", None],
            "when": pa.array([0, None, 10**15], pa.timestamp("us")),
            "small": pa.array([1, 2, 3], pa.int8()),
            "max_tokens": pa.array([2, None, 3], pa.int32()),
        }
    )
    pq.write_table(table, bench.path / "in.parquet")
    bench.output = bench.path / "out.parquet"
    bench.run(inputs=(str(bench.path / "in.parquet"),))
    result = pq.read_table(bench.output)
    assert result.select(table.column_names).equals(table)
    assert result["completion_tokens"].to_pylist() == [2, 8, None]
    assert result["error"].to_pylist()[2]["code"] == "empty_prompt"


def test_the_error_tolerance_decides_over_the_exit_code(bench: Bench) -> None:
    bench.write([*prompts(9), {"prompt": ""}])
    assert bench.run(error_tolerance=0.05).exit_code == 1
    assert bench.run(error_tolerance=0.1).exit_code == 0


def test_limit_takes_the_first_rows(bench: Bench) -> None:
    bench.write(prompts(10))
    assert bench.run(limit=3).rows == 3
    assert [row["id"] for row in bench.rows()] == [0, 1, 2]


def test_too_many_errors_end_the_job_and_keep_what_is_finished(bench: Bench) -> None:
    bench.write([*prompts(5), *[{"prompt": ""}] * 50, *prompts(500)])
    with pytest.raises(CbatchError, match=r"after \d+ failed rows \(--max-errors 10\)") as caught:
        bench.run(max_errors=10)
    assert caught.value.exit_code == 1
    assert not bench.output.exists()
    assert bench.num_prompts_run < 300


def test_messages_without_a_template_fail_once_and_not_per_row(bench: Bench) -> None:
    bench.engine_options = {"tokenizer": StubTokenizer(has_chat_template=False)}
    bench.write([{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(50)])
    with pytest.raises(UsageError, match=r"in.jsonl:1 holds messages, and the model has no chat template"):
        bench.run()
    assert bench.num_prompts_run == 0


def test_one_chat_among_texts_is_a_row_error_where_there_is_no_template(bench: Bench) -> None:
    bench.engine_options = {"tokenizer": StubTokenizer(has_chat_template=False)}
    bench.write([{"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]}])
    bench.run()
    assert bench.rows()[1]["error"]["code"] == "no_chat_template"


def test_overlong_prompts_are_cut_where_asked_and_counted(bench: Bench) -> None:
    bench.engine_options = {"plan": StubPlan(max_model_len=30)}
    bench.write([{"prompt": "x" * 50, "max_tokens": 10}, {"prompt": "short"}])
    bench.run()
    assert bench.rows()[0]["error"]["code"] == "prompt_too_long"
    bench.run(on_overlong="truncate-right")
    rows, report = bench.rows(), bench.report()
    assert [row["error"] for row in rows] == [None, None]
    assert rows[0]["prompt_tokens"] == 20
    assert (report["rows_truncated"], report["truncated_tokens"]) == (1, 31)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"inputs": ("missing.jsonl",)}, UsageError, "no such input"),
        ({"output": "out.txt"}, UsageError, "out.txt"),
        ({"output": "no/such/dir/out.jsonl"}, UsageError, "does not exist"),
        ({"output": "s3://bucket/out.jsonl"}, UsageError, r"seems to be a URL \(name a local file"),
        ({"checkpoint_dir": "gs://bucket/x"}, UsageError, r"seems to be a URL \(name a local file"),
        ({"sampling": {"top_p": 7}}, UsageError, "top_p must be"),
        ({"checkpoint_dir": "no/such"}, UsageError, "checkpoint directory"),
    ],
)
def test_mistakes_are_found_before_the_model_loads(
    bench: Bench, options: dict[str, Any], error: type[CbatchError], says: str
) -> None:
    bench.write(prompts(3))
    with pytest.raises(error, match=says):
        bench.run(**options)
    assert bench.engines == []


def test_an_output_with_mixed_messages_is_an_input_like_any_other(bench: Bench) -> None:
    contents = ["a", [{"type": "text", "text": "b"}]]
    bench.write([{"messages": [{"role": "user", "content": content}]} for content in contents])
    first, second = bench.path / "one.parquet", bench.path / "two.parquet"
    bench.run(output=str(first))
    assert bench.run(inputs=(str(first),), output=str(second)).rows_ok == 2
    answers = [[row["completion"] for row in read_rows(path)] for path in (first, second)]
    assert answers[0] == answers[1]


def test_what_is_kept_of_rows_that_cannot_be_read_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one can be read, each might be of a batch file."""
    monkeypatch.setattr("cbatch.jobs.opening.MAX_UNREADABLE", 5)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    for num_torn, is_batch in ((4, True), (5, False)):
        bench.write(["torn {"] * num_torn + [request])
        bench.run(output=str(bench.path / f"{num_torn}.jsonl"))
        assert ("response" in read_rows(bench.path / f"{num_torn}.jsonl")[-1]) == is_batch


def test_no_job_overwrites_its_input(bench: Bench) -> None:
    file = bench.write(prompts(3))
    before = file.read_bytes()
    link = bench.path / "link.jsonl"
    link.symlink_to(file)
    for output in (file, link):
        with pytest.raises(UsageError, match="would be overwritten"):
            bench.run(output=str(output))
    assert file.read_bytes() == before


def test_an_input_that_breaks_off_keeps_its_rows_and_fails(bench: Bench) -> None:
    import gzip

    rows = [{"prompt": f"p{n} {n * 7919}"} for n in range(3000)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (bench.path / "in.jsonl").write_bytes(whole[: len(whole) * 8 // 10])
    with pytest.raises(InputError, match=r"in\.jsonl"):
        bench.run()
    assert not bench.output.exists()
    finished = bench.num_prompts_run
    assert finished > 1000
    (bench.path / "in.jsonl").write_bytes(whole)
    summary = bench.run()
    assert (summary.rows, summary.rows_replayed) == (3000, finished)
    assert bench.num_prompts_run == 3000


def test_an_engine_that_fails_keeps_the_finished_rows(bench: Bench) -> None:
    bench.write(prompts(100))
    bench.engine_options = {"fail_at_step": 30}
    with pytest.raises(EngineError, match="the device was lost"):
        bench.run()
    assert not bench.output.exists()
    bench.engine_options = {}
    summary = bench.run()
    assert summary.rows_replayed == 24
    assert len(bench.rows()) == 100


def test_a_bug_in_any_thread_surfaces_once_and_hangs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(prompts(100))

    class Broken(StubTokenizer):
        def decode(self, ids: list[int]) -> str:
            raise ZeroDivisionError("a bug")

    bench.engine_options = {"tokenizer": Broken()}
    with pytest.raises(ZeroDivisionError):
        bench.run()

    def broken(_self: object, _row: object) -> bool:
        raise ZeroDivisionError("a bug")

    bench.engine_options = {}
    monkeypatch.setattr("cbatch.jobs.feeder.Feeder._feed", broken)
    with pytest.raises(ZeroDivisionError):
        bench.run()


def test_a_tokenizer_that_fails_on_one_row_costs_that_row(bench: Bench) -> None:
    class Picky(StubTokenizer):
        def encode(self, text: str) -> list[int]:
            if text == "prompt 3":
                raise RuntimeError("I will not")
            return super().encode(text)

    bench.engine_options = {"tokenizer": Picky()}
    bench.write(prompts(5))
    bench.run()
    assert [row["error"] is None for row in bench.rows()] == [True, True, True, False, True]


def test_a_disk_that_fills_up_at_the_end_leaves_no_output(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(prompts(20))

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cbatch.io.atomic.AtomicFile._keep_mode", full)
    with pytest.raises(OutputError, match=r"No space left on device \(the finished rows are safe in .*journal"):
        bench.run()
    assert [path.name for path in bench.path.iterdir() if path.name.startswith(("out.jsonl", "."))] == [
        "out.jsonl.journal.jsonl"
    ]
    monkeypatch.undo()
    assert bench.run().rows_replayed == 20
    assert len(bench.rows()) == 20


def test_the_prompt_column_is_read_and_passed_through(bench: Bench) -> None:
    bench.write([{"question": "why", "prompt": "not this"}])
    bench.run(prompt_column="question")
    assert bench.rows()[0]["completion"] == expected("why")
    assert bench.report()["prompt"] == {"prompt_column": "question"}, "the report says what the prompt was"


def test_an_input_without_prompts_never_loads_the_model(bench: Bench) -> None:
    bench.write([{"text": f"{n}"} for n in range(500)])
    summary = bench.run()
    assert (summary.rows_error, summary.exit_code) == (500, 1)
    assert "--prompt-column" in (summary.first_error or "")
    assert bench.engines == []


def test_outputs_are_utf8_and_read_back(bench: Bench) -> None:
    bench.write([{"prompt": "漢字 👍🏽 é"}])
    bench.run()
    assert "漢字 👍🏽 é".encode() in bench.output.read_bytes()
    assert read_rows(bench.output)[0]["prompt"] == "漢字 👍🏽 é"


def test_the_stub_follows_the_engine_interface() -> None:
    from cbatch.jobs.loop import BatchEngine

    engine: BatchEngine = StubEngine()
    assert engine.plan.max_model_len == 4096


def test_csv_rows_have_parameters_too(bench: Bench) -> None:
    file = bench.path / "in.csv"
    file.write_text("prompt,max_tokens,stop\nabc,3,\ndef,,\nghi,x,\n", encoding="utf-8")
    bench.run(inputs=(str(file),))
    rows = bench.rows()
    assert [row["completion"] for row in rows[:2]] == [expected("abc", max_tokens=3), expected("def")]
    assert rows[2]["error"]["code"] == "bad_parameter"
    assert rows[0]["max_tokens"] == "3", "columns pass through as they were"
