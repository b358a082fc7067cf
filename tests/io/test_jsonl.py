"""JSON lines in: what is a line, what is a row, what is a row's error (spec I1, I5)."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.errors import InputError
from cbatch.io import jsonform
from cbatch.io.jsonl import count_rows, read_jsonl, split_lines
from cbatch.io.rows import Row
from cbatch.io.sources import open_source


def rows_of(content: bytes, name: str = "in.jsonl") -> list[Row]:
    return list(read_jsonl(name, [content], 0))


def only_row(line: bytes) -> Row:
    """The row of `line` between two good neighbours, which must not suffer from it."""
    before, row, after = rows_of(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert (before.columns, after.columns) == ({"a": 1}, {"a": 2})
    assert row.location == "in.jsonl:2"
    assert row.index == 1
    return row


@settings(deadline=None)
@given(st.lists(st.binary().filter(lambda line: b"\n" not in line)), st.data())
def test_lines_do_not_depend_on_chunk_borders(lines: list[bytes], data: st.DataObject) -> None:
    content = b"".join(line + b"\n" for line in lines)
    chunks = []
    while content:
        size = data.draw(st.integers(1, len(content)))
        chunks.append(content[:size])
        content = content[size:]
    assert list(split_lines(chunks)) == lines


def test_the_last_line_needs_no_newline() -> None:
    assert [row.columns for row in rows_of(b'{"a": 1}\n{"a": 2}')] == [{"a": 1}, {"a": 2}]


def test_columns_keep_their_order_and_their_strings() -> None:
    text = json.dumps({"z": "2024-01-01", "a": "name: int64, when: date32", "b": '{"x": 1}\n'})
    (row,) = rows_of(text.encode())
    assert list(row.columns.items()) == [("z", "2024-01-01"), ("a", "name: int64, when: date32"), ("b", '{"x": 1}\n')]


def test_unicode_line_separators_are_text() -> None:
    text = "one\u2028two\u2029three\x85four"
    row = only_row(json.dumps({"prompt": text + "\x0b\x0c\x1c"}, ensure_ascii=False).encode())
    assert row.columns == {"prompt": text + "\x0b\x0c\x1c"}


def test_blank_lines_are_no_rows_but_count_as_lines() -> None:
    rows = rows_of(b'\n{"a": 1}\r\n   \n\r\n\t\n{"a": 2}\n\n\n')
    assert [(row.index, row.location, row.columns) for row in rows] == [
        (0, "in.jsonl:2", {"a": 1}),
        (1, "in.jsonl:6", {"a": 2}),
    ]


def test_a_byte_order_mark_is_skipped() -> None:
    assert rows_of(b'\xef\xbb\xbf{"a": 1}\n')[0].columns == {"a": 1}
    assert only_row(b'\xef\xbb\xbf{"a": 3}').columns == {"a": 3}  # in the middle after `cat a b`


def test_integers_are_exact_at_any_size() -> None:
    (row,) = rows_of(b'{"id": 98765432109876543210, "seed": 9223372036854775808, "n": 9007199254740993, "s": "007"}')
    assert row.columns == {"id": 98765432109876543210, "seed": 2**63, "n": 9007199254740993, "s": "007"}


def test_lone_surrogates_are_read() -> None:
    assert only_row(rb'{"prompt": "a\ud83db"}').columns == {"prompt": "a\ud83db"}


def test_the_last_of_two_equal_keys_counts() -> None:
    assert only_row(b'{"a": 1, "a": 2}').columns == {"a": 2}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"a": 1', "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b'{"a": 1} {"b": 2}', "invalid_json"),
        (b'{"a": 1}\r{"b": 2}', "invalid_json"),
        (b"\x00\x00\x00", "invalid_json"),
        (b'{"a": "\x00"}', "invalid_json"),
        (b'{"a": ' + b"1" * 5000 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": "\xed\xa0\xbd"}', "invalid_utf8"),
        (b"[1, 2]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"12", "not_an_object"),
        (b"true", "not_an_object"),
        (b"null", "not_an_object"),
    ],
)
def test_a_bad_line_is_its_rows_error(line: bytes, code: str) -> None:
    row = only_row(line)
    assert row.error is not None
    assert row.error.code == code
    assert row.columns == {}


def test_the_error_says_what_is_wrong() -> None:
    assert "array" in str(only_row(b"[1]").error)
    assert "0xff at column 8" in str(only_row(b'{"a": "\xff"}').error)
    assert "carriage returns" in str(only_row(b'{"a": 1}\r{"b": 2}').error)
    assert "4,300 digits" in str(only_row(b'{"a": ' + b"1" * 5000 + b"}").error)


def test_brackets_in_strings_are_not_nesting() -> None:
    text = '["' + "[" * 5000 + '\\"' + "{" * 5000 + '"]'
    row = only_row(b'{"a": ' + text.encode() + b"}")
    assert row.columns == {"a": json.loads(text)}


def test_a_row_as_deep_as_can_be_fits_into_a_journals_line() -> None:
    deep = b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}"
    row = only_row(deep)
    assert jsonform.load(jsonform.dump({"columns": row.columns})) == {"columns": row.columns}
    assert only_row(deep.replace(b"[]", b"[[]]")).error is not None


def test_a_long_line_is_read_whole() -> None:
    line = json.dumps({"prompt": "x" * 5_000_000}).encode()
    chunks = [line[start : start + 1000] for start in range(0, len(line), 1000)]
    (row,) = read_jsonl("in.jsonl", chunks, 0)
    assert len(row.columns["prompt"]) == 5_000_000


def test_a_line_beyond_the_limit_is_dropped_and_the_next_one_read() -> None:
    chunks = [b"12", b"34", b"567\n1", b"2\n123456\n12", b"3456"]
    assert list(split_lines(chunks, max_bytes=5)) == [None, b"12", None, None]
    assert list(split_lines([b"12345\n12345"], max_bytes=5)) == [b"12345", b"12345"]


@pytest.mark.parametrize(
    "content",
    [
        b'[\n  {"a": 1},\n  {"a": 2}\n]\n',
        b'[{"a": 1},\n {"a": 2}]\n',
        b'[{"a": 1}, {"a": 2}]',
        b'\xef\xbb\xbf[\r\n{"a": 1}\r\n]\r\n',
        b"[]\n",
        b'{\n  "a": 1\n}\n',
    ],
)
def test_a_json_array_or_pretty_printed_object_is_one_error_with_the_way_out(content: bytes) -> None:
    with pytest.raises(InputError, match="jq -c"):
        rows_of(content)


def test_rows_that_are_arrays_are_row_errors() -> None:
    """Every line is JSON, so the file is JSON lines, if not of objects."""
    codes = [row.error.code for row in rows_of(b'[{"a": 1}]\n[{"a": 2}]\n') if row.error]
    assert codes == ["not_an_object", "not_an_object"]
    mixed = rows_of(b'[1, 2\n{"a": 2}\n')
    assert [row.error is None for row in mixed] == [False, True]


@given(st.lists(st.sampled_from([b"{}", b"x" * 9, b"\n", b" ", b"\t\r", b"\n\n", b"a b"]), max_size=30))
def test_rows_are_counted_as_they_are_read_wherever_chunks_end(chunks: list[bytes]) -> None:
    expected = sum(bool(line.strip(b" \t\r")) for line in b"".join(chunks).split(b"\n"))
    assert count_rows(chunks) == count_rows([b"".join(chunks)]) == expected


def test_a_nearly_empty_file_has_no_rows() -> None:
    assert rows_of(b"") == []
    assert rows_of(b"\n \n\xef\xbb\xbf\n") == []


def test_rows_are_counted_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\nnonsense\n')
    (tmp_path / "b.jsonl").write_bytes(b'\n{"a": 2}\n')
    source = open_source([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    for _ in range(2):  # a source can be read again
        assert [(row.index, row.location.rsplit("/", 1)[1]) for row in source] == [
            (0, "a.jsonl:1"),
            (1, "a.jsonl:2"),
            (2, "b.jsonl:2"),
        ]
