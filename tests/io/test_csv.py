"""CSV in: a header, then text; bad rows are row errors (spec I1, I5)."""

from pathlib import Path

import pyarrow as pa
import pytest

from cbatch.errors import InputError
from cbatch.io.csvfile import read_csv, read_header
from cbatch.io.rows import Row
from cbatch.io.sources import open_source


def rows_of(content: bytes, chunk: int = 7) -> list[Row]:
    return list(read_csv("in.csv", [content[i : i + chunk] for i in range(0, len(content), chunk)], 0))


def test_values_are_text(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,when,empty,n\n007,2024-01-01,,1e3\n")
    source = open_source([str(tmp_path / "in.csv")])
    assert [row.columns for row in source] == [{"id": "007", "when": "2024-01-01", "empty": "", "n": "1e3"}]
    assert source.schema == pa.schema([(name, pa.string()) for name in ("id", "when", "empty", "n")])


def test_quoted_fields_hold_anything() -> None:
    text = 'a\nb\r\nc "d", e\u2028\x85\x00'
    quoted = text.replace('"', '""')
    first, second = rows_of(f'x,y\r\n"{quoted}",é\r\n1,2'.encode())
    assert first.columns == {"x": text, "y": "é"}
    assert second.columns == {"x": "1", "y": "2"}
    assert [first.location, second.location] == ["in.csv:2", "in.csv:5"]  # physical lines


def test_blank_lines_are_no_rows_and_a_byte_order_mark_is_skipped() -> None:
    rows = rows_of(b"\xef\xbb\xbfx,y\n\n1,2\n\r\n3,4\n\n")
    assert [(row.index, row.location, row.columns["x"]) for row in rows] == [(0, "in.csv:3", "1"), (1, "in.csv:5", "3")]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b"1", "wrong_field_count", "1 fields where the header has 2"),
        (b"1,2,3", "wrong_field_count", "3 fields"),
        (b"a,\xe9t\xe9", "invalid_utf8", "column y"),
        (b'"a"b,c', "invalid_csv", "expected after"),
        (b"a\rb,c", "invalid_csv", "carriage return"),
    ],
)
def test_a_bad_row_is_its_own_error(line: bytes, code: str, message: str) -> None:
    before, row, after = rows_of(b"x,y\n1,2\n" + line + b"\n3,4\n")
    assert (before.columns["x"], after.columns["x"]) == ("1", "3")
    assert row.error is not None
    assert row.error.code == code
    assert message in str(row.error)
    assert (row.index, row.location, row.columns) == (1, "in.csv:3", {})


def test_a_quote_that_is_never_closed_is_said_with_its_line() -> None:
    rows = rows_of(b'x,y\n1,2\n"3,4\n5,6\n')
    assert [row.location for row in rows] == ["in.csv:2", "in.csv:3"]
    assert "never closed" in str(rows[1].error)


def test_a_long_field_is_read_whole() -> None:
    (row,) = rows_of(b"x\n" + b"y" * 300_000 + b"\n", chunk=10_000)
    assert len(row.columns["x"]) == 300_000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"x,,y", "column 2 has no name"),
        (b"x,y,x", "two columns are named 'x'"),
        (b"\xe9", "not UTF-8"),
        (b'"x', "header"),
    ],
)
def test_a_bad_header_is_one_clear_error(header: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_header("in.csv", [header + b"\n1,2\n"])
