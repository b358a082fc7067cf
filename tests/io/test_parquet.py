"""Parquet in and out: streamed, every type lossless, one schema whatever the rows (spec I1, I4)."""

import json
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch.errors import InputError, OutputError, UsageError
from cbatch.io import parquet
from cbatch.io.arrowform import JSON_TEXT
from cbatch.io.columns import RESULT_COLUMNS, merge_record, output_names
from cbatch.io.inference import TypeInference
from cbatch.io.jsonform import dump, load
from cbatch.io.schema import ARROW_TYPES, output_schema
from cbatch.io.sinks import open_sink
from cbatch.io.sources import Source, open_source

NAMES = output_names([], {"return_token_ids", "logprobs", "prompt_logprobs"})
RESULT = {
    "row": 0,
    "completion": "text",
    "finish_reason": "stop",
    "stop_reason": 2,
    "completion_token_ids": [1, 2],
    "scheduled_at": "2026-01-31T12:00:00.250000Z",
    "queue_s": 0.5,
}
ALL_TYPES: dict[str, pa.Array] = {
    "text": pa.array(["a", None, "c"]),
    "number": pa.array([1, None, 2**63 - 1]),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "float": pa.array([math.inf, None, 0.1], pa.float32()),
    "time": pa.array([1, None, -1], pa.timestamp("ns", "Europe/Paris")),
    "day": pa.array([0, None, 20_000], pa.date32()),
    "span": pa.array([5, None, -5], pa.duration("ns")),
    "price": pa.array([Decimal("1.50"), None, Decimal("-0.01")], pa.decimal128(10, 2)),
    "blob": pa.array([b"\x00\xff", None, b""]),
    "word": pa.array(["a", None, "a"]).dictionary_encode(),
    "when": pa.array([1, None, 1], pa.timestamp("us")).dictionary_encode(),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.date32())),
    "messages": pa.array(
        [[{"role": "user", "at": 1}], None, []],
        pa.list_(pa.struct([("role", pa.string()), ("at", pa.timestamp("ms"))])),
    ),
    "nothing": pa.nulls(3),
    "words": pa.array([["a"], None, []], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "id": pa.array([uuid.UUID(int=1).bytes, None, uuid.UUID(int=2).bytes], pa.uuid()),
    "view": pa.array([[1], None, []], pa.list_view(pa.int64())),
}


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> str:
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def copy(source: Source, path: Path) -> pa.Table:
    """What a job does with its rows, their way through the journal included."""
    names = output_names(source.schema.names if source.schema else [], ())
    records = [load(dump(merge_record(row.columns, {"row": row.index}, names))) for row in source]
    schema = source.schema
    if schema is None:
        inference = TypeInference()
        for row in source:
            inference.observe(row.columns)
        schema = inference.schema()
    with open_sink(str(path), output_schema(schema, names)) as sink:
        for record in records:
            sink.write(record)
        sink.commit()
    return pq.read_table(path)


def test_every_type_comes_through_to_parquet(tmp_path: Path) -> None:
    source = open_source([write_table(tmp_path / "in.parquet", ALL_TYPES)])
    table = copy(source, tmp_path / "out.parquet")
    before = pq.read_table(tmp_path / "in.parquet")
    plain = {
        "when": pa.timestamp("us"),
        "words": pa.list_(pa.string()),
        "id": pa.binary(16),
        "view": pa.list_(pa.int64()),
    }
    for name in ALL_TYPES:
        kind = before.schema.field(name).type
        assert table.schema.field(name).type == plain.get(name, kind), name
    for name in ALL_TYPES.keys() - plain.keys():
        assert table[name].equals(before[name]), name
    assert table["when"].cast(pa.int64()).to_pylist() == [1, None, 1]
    assert table["words"].to_pylist() == [["a"], None, []]
    assert table["id"].to_pylist() == [uuid.UUID(int=1).bytes, None, uuid.UUID(int=2).bytes]
    assert table["view"].to_pylist() == [[1], None, []]


def test_rows_hold_plain_values(tmp_path: Path) -> None:
    source = open_source([write_table(tmp_path / "in.parquet", ALL_TYPES)])
    first, second, _ = source
    assert (first.index, first.location, first.error) == (0, f"{tmp_path}/in.parquet[0]", None)
    assert first.columns["number"] == 1
    assert first.columns["messages"] == [{"role": "user", "at": "1970-01-01T00:00:00.001"}]
    assert first.columns["blob"] == b"\x00\xff"
    assert set(second.columns.values()) == {None}
    assert list(first.columns) == list(ALL_TYPES)


def test_infinities_are_null_in_json_lines(tmp_path: Path) -> None:
    columns = {"x": pa.array([math.nan, 0.5]), "name": pa.array(["NaN", "Infinity"])}
    source = open_source([write_table(tmp_path / "in.parquet", columns)])
    assert source.schema is not None
    with open_sink(str(tmp_path / "out.jsonl"), output_schema(source.schema, {})) as sink:
        for row in source:
            sink.write(load(dump(row.columns)))
        sink.commit()
        assert sink.num_nulled == 1
    assert (tmp_path / "out.jsonl").read_text() == '{"x": null, "name": "NaN"}\n{"x": 0.5, "name": "Infinity"}\n'


def test_files_of_one_schema_are_unified(tmp_path: Path) -> None:
    one = write_table(tmp_path / "1.parquet", {"a": pa.array([1], pa.int32()), "b": pa.array(["x"])})
    two = write_table(tmp_path / "2.parquet", {"a": pa.array([2**40]), "c": pa.nulls(1)})
    source = open_source([one, two])
    assert source.schema == pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.null())])
    assert [row.columns for row in source] == [{"a": 1, "b": "x"}, {"a": 2**40, "c": None}]
    assert copy(source, tmp_path / "out.parquet")["a"].to_pylist() == [1, 2**40]


def test_files_that_disagree_are_read_as_json_would_be(tmp_path: Path) -> None:
    one = write_table(tmp_path / "1.parquet", {"a": pa.array([1])})
    two = write_table(tmp_path / "2.parquet", {"a": pa.array(["x"]), "f": pa.array([math.nan])})
    (tmp_path / "3.jsonl").write_text('{"a": [1]}\n')
    source = open_source([one, two])
    assert source.schema is None
    assert [row.columns["a"] for row in source] == [1, "x"]
    assert [math.isnan(row.columns["f"]) for row in source if "f" in row.columns] == [True]
    source = open_source([one, two, str(tmp_path / "3.jsonl")])
    table = copy(source, tmp_path / "out.parquet")
    assert table["a"].to_pylist() == ["1", '"x"', "[1]"]
    assert table.schema.field("a").metadata == JSON_TEXT
    assert table["row"].to_pylist() == [0, 1, 2]


def test_rows_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of any size are read a few rows at a time."""
    name = write_table(tmp_path / "in.parquet", {"a": pa.array(range(1000))}, row_group_size=1000)
    sizes = []
    to_json = parquet.to_json
    monkeypatch.setattr(parquet, "to_json", lambda array: sizes.append(len(array)) or to_json(array))
    assert [row.columns["a"] for row in open_source([name])] == list(range(1000))
    assert max(sizes) == parquet.READ_ROWS < 1000


def test_a_file_without_rows_has_none_and_keeps_its_columns(tmp_path: Path) -> None:
    source = open_source([write_table(tmp_path / "in.parquet", {"a": pa.array([], pa.date32())})])
    assert list(source) == []
    assert copy(source, tmp_path / "out.parquet").schema.field("a").type == pa.date32()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1xxxxxx", b"not parquet at all"])
def test_what_is_no_parquet_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot read .*in\.parquet as Parquet"):
        open_source([str(tmp_path / "in.parquet")])


def test_a_damaged_page_is_an_error_after_the_good_rows(tmp_path: Path) -> None:
    texts = [f"{row:06}" * 50 for row in range(2000)]
    path = tmp_path / "in.parquet"
    write_table(path, {"a": pa.array(texts)}, row_group_size=500, use_dictionary=False, compression="snappy")
    offset = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 200] = b"\xff" * 200
    path.write_bytes(content)
    rows = iter(open_source([str(path)]))
    assert [next(rows).columns["a"] for _ in range(1000)] == texts[:1000]
    with pytest.raises(InputError, match="cannot read"):
        next(rows)


def test_text_that_is_none_is_its_rows_error(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"\xff\xfe", b"good"]).view(pa.string())
    rows = list(open_source([write_table(tmp_path / "in.parquet", {"a": texts})]))
    assert [row.error and row.error.code for row in rows] == [None, "invalid_utf8", None]
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[2].columns == {"a": "good"}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(UsageError, match="two columns of one name"):
        open_source([str(tmp_path / "in.parquet")])


def test_first_bytes_win_over_the_suffix(tmp_path: Path) -> None:
    name = write_table(tmp_path / "in.jsonl", {"a": pa.array([1])})
    assert [row.columns for row in open_source([name])] == [{"a": 1}]


def test_the_schema_is_the_same_for_empty_all_error_and_normal_runs(tmp_path: Path) -> None:
    schema = output_schema(pa.schema([("prompt", pa.string())]), NAMES)
    error = {"row": 0, "finish_reason": "error", "error": {"code": "x", "message": "y"}}
    runs = {
        "empty": [],
        "error": [merge_record({}, error, NAMES)],
        "normal": [merge_record({"prompt": "p"}, RESULT, NAMES)],
    }
    schemas = []
    for name, records in runs.items():
        with open_sink(str(tmp_path / f"{name}.parquet"), schema) as sink:
            for record in records:
                sink.write(record)
            sink.commit()
        schemas.append(pq.read_schema(tmp_path / f"{name}.parquet"))
    assert schemas[0] == schemas[1] == schemas[2] == schema
    assert [field.type for field in schema][1:] == [ARROW_TYPES[column.type] for column in RESULT_COLUMNS]
    table = pq.read_table(tmp_path / "normal.parquet")
    assert table["stop_reason"].to_pylist() == ["2"]
    assert table["scheduled_at"].to_pylist()[0].isoformat() == "2026-01-31T12:00:00.250000+00:00"
    assert pq.read_table(tmp_path / "error.parquet")["error"].to_pylist() == [{"code": "x", "message": "y"}]


def test_json_columns_keep_what_they_hold(tmp_path: Path) -> None:
    rows = [
        {"id": 98765432109876543210, "text": "a\ud83db", "n": 9007199254740993, "s": "007", "meta": {}, "x\udc00": 1},
        {"id": "a", "text": "2024-01-01", "n": None, "meta": [], "late": {"k": 0.5}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"system": None}] * 5000 + rows))
    (tmp_path / "late.jsonl").write_text('{"system": "text"}\n')
    table = copy(open_source([str(tmp_path / "in.jsonl"), str(tmp_path / "late.jsonl")]), tmp_path / "out.parquet")
    columns = {name: table[name].to_pylist()[-3:-1] for name in table.schema.names}
    assert columns["id"] == ["98765432109876543210", '"a"']
    assert columns["text"] == ["a\ufffdb", "2024-01-01"]
    assert columns["n"] == [9007199254740993, None]
    assert columns["s"] == ["007", None]
    assert columns["meta"] == ["{}", "[]"]
    assert columns["late"] == [None, {"k": 0.5}]
    assert columns["x\ufffd"] == [1, None]
    assert table["system"].to_pylist() == [None] * 5002 + ["text"]


def test_json_columns_are_read_back_as_what_they_held(tmp_path: Path) -> None:
    values = [{"k": 1}, [1, "a"], "text", '{"not": "read"}', None, 98765432109876543210]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"v": value, "t": "[1]"}) + "\n" for value in values))
    for source, target in (("in.jsonl", "one.parquet"), ("one.parquet", "two.parquet")):
        table = copy(open_source([str(tmp_path / source)]), tmp_path / target)
        rows = [row.columns for row in open_source([str(tmp_path / target)])]
        assert [row["v"] for row in rows] == values
        assert {row["t"] for row in rows} == {"[1]"}, "a text is a text"
    assert table["v"].to_pylist()[:3] == ['{"k": 1}', '[1, "a"]', '"text"']
    mixed = open_source([str(tmp_path / "one.parquet"), str(tmp_path / "in.jsonl")])
    assert [row.columns["v"] for row in mixed] == values * 2
    text = [field.remove_metadata() for field in table.schema]
    pq.write_table(pa.table(table.columns, schema=pa.schema(text)), tmp_path / "text.parquet")
    both = open_source([str(tmp_path / "one.parquet"), str(tmp_path / "text.parquet")])
    assert [row.columns["v"] for row in both] == [*values, *table["v"].to_pylist()]


def test_rows_go_out_in_row_groups_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 30_000)
    with open_sink(str(tmp_path / "out.parquet"), pa.schema([("a", pa.string())])) as sink:
        for row in range(2000):
            sink.write({"a": f"{row:100}"})
        sink.commit()
    metadata = pq.read_metadata(tmp_path / "out.parquet")
    assert metadata.num_row_groups == 4
    assert max(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) == 2 * parquet.WRITE_ROWS
    assert [int(a) for a in pq.read_table(tmp_path / "out.parquet")["a"].to_pylist()] == list(range(2000))


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [{"content": text}]])
def test_long_texts_are_not_gathered_beyond_what_a_row_group_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[str], Any]
) -> None:
    """Arrow's arrays of text end at 2 GiB, and the memory may end before."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 30_000)
    kind = pa.array([wrap("a")]).type
    with open_sink(str(tmp_path / "out.parquet"), pa.schema([("a", kind)])) as sink:
        for _ in range(20):
            sink.write({"a": wrap("x" * 10_000)})
        sink.commit()
    metadata = pq.read_metadata(tmp_path / "out.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3] * 6 + [2]
    assert pq.read_table(tmp_path / "out.parquet")["a"].to_pylist() == [wrap("x" * 10_000)] * 20


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with open_sink(str(tmp_path / "out.parquet"), pa.schema([("a", pa.string())])) as sink:
        sink.write({"a": "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_does_not_fit_is_an_output_error(tmp_path: Path) -> None:
    with open_sink(str(tmp_path / "out.parquet"), pa.schema([("a", pa.int64())])) as sink:
        sink.write({"a": "text"})
        with pytest.raises(OutputError, match="column a"):
            sink.commit()
    assert list(tmp_path.iterdir()) == []
