"""JSON lines in: bytes split at newlines only, each line a row or a row error. Called by `cbatch.io.sources`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from cbatch.errors import InputError, RowError
from cbatch.io import jsonform
from cbatch.io.rows import Row

MAX_LINE_BYTES = 256 << 20  # a longer line is a row error, so that a file without newlines cannot fill the memory
MAX_NESTING = 100  # levels of a row; fewer than `jsonform` takes, because a journal wraps rows in objects of its own
_JSON_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(rb"\n[ \t\r]*(?=\n)")
_WAY_OUT = "cbatch reads one JSON object per line: jq -c {filter} {name} > rows.jsonl"


def split_lines(chunks: Iterable[bytes], *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield lines without their newlines; None stands for a line beyond `max_bytes`.

    Only b"\\n" ends a line: U+2028, U+0085, vertical tabs and the like are text.
    """
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        size += len(first)
        if size <= max_bytes:
            pieces.append(first)
        else:
            pieces.clear()
        if not rest:
            continue
        yield b"".join(pieces) if size <= max_bytes else None
        for line in rest[:-1]:
            yield line if len(line) <= max_bytes else None
        pieces, size = [rest[-1]], len(rest[-1])
    if size > max_bytes:
        yield None
    elif size:
        yield b"".join(pieces)


def read_jsonl(name: str, chunks: Iterable[bytes], first_index: int) -> Iterator[Row]:
    """Yield the rows of one file; blank lines are no rows, yet they count in the location.

    Raises InputError where the file is one JSON array or a pretty-printed object rather than JSON lines.
    """
    rows = _read_rows(name, chunks, first_index)
    first = next(rows, None)
    if first is None:
        return
    row, text = first
    if text in (b"[", b"{"):
        raise _not_lines(name, text)
    second = next(rows, None) if text.startswith(b"[") else None
    if text.startswith(b"[") and (second is None or (_is_unparsed(row) and _is_unparsed(second[0]))):
        raise _not_lines(name, text)
    yield row
    if second is not None:
        yield second[0]
    for row, _ in rows:
        yield row


def count_rows(chunks: Iterable[bytes]) -> int:
    """Count the lines of one file that are not blank, without making an object of each."""
    num_rows = 0
    is_blank = True  # the line at hand, so far
    for chunk in chunks:
        first, last = chunk.find(b"\n"), chunk.rfind(b"\n")
        if first < 0:
            is_blank = is_blank and not chunk.strip(_JSON_SPACE)
            continue
        num_blank = (is_blank and not chunk[:first].strip(_JSON_SPACE)) + sum(
            1 for _ in _BLANK.finditer(chunk, first, last + 1)
        )
        num_rows += chunk.count(b"\n") - num_blank
        is_blank = not chunk[last + 1 :].strip(_JSON_SPACE)
    return num_rows + (not is_blank)


def _read_rows(name: str, chunks: Iterable[bytes], first_index: int) -> Iterator[tuple[Row, bytes]]:
    """Yield each row with the text that it was read from."""
    index = first_index
    for number, raw in enumerate(split_lines(chunks), start=1):
        text = raw.strip(_JSON_SPACE).removeprefix(_BOM).strip(_JSON_SPACE) if raw is not None else b""
        if not text and raw is not None:
            continue
        columns, error = _parse(text) if raw is not None else ({}, _too_long())
        yield Row(index, f"{name}:{number}", columns, error), text
        index += 1


def _parse(text: bytes) -> tuple[dict[str, Any], RowError | None]:
    try:
        value = jsonform.load(text.decode(), max_nesting=MAX_NESTING)
    except UnicodeDecodeError as error:
        return {}, RowError("invalid_utf8", f"not UTF-8: byte 0x{text[error.start]:02x} at column {error.start + 1}")
    except ValueError as error:
        return {}, RowError("invalid_json", f"not JSON: {_explain(error, text)}")
    if not isinstance(value, dict):
        return {}, RowError("not_an_object", f"a JSON {_json_kind(value)}, not an object with columns")
    return value, None


def _explain(error: ValueError, text: bytes) -> str:
    message = str(error)
    if "integer string conversion" in message:
        return "a number of more than 4,300 digits"
    if b"\r" in text:
        return f"{message}; the line holds bare carriage returns, which do not end a line"
    return message


def _too_long() -> RowError:
    return RowError("line_too_long", f"longer than {MAX_LINE_BYTES >> 20} MiB")


def _is_unparsed(row: Row) -> bool:
    return row.error is not None and row.error.code == "invalid_json"


def _not_lines(name: str, text: bytes) -> InputError:
    kind, jq_filter = ("one JSON array", "'.[]'") if text.startswith(b"[") else ("a pretty-printed JSON object", ".")
    return InputError(f"{name} is {kind}, not JSON lines", hint=_WAY_OUT.format(filter=jq_filter, name=name))


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", str: "string", list: "array"}.get(type(value), "number")
