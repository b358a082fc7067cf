"""CSV in: a header line, then rows whose values are text, all of them. Called by `cbatch.io.sources`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cbatch.errors import InputError, RowError
from cbatch.io.jsonl import MAX_LINE_BYTES, split_lines
from cbatch.io.rows import Row

if TYPE_CHECKING:
    import _csv

_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of bytes that are not UTF-8


def read_header(name: str, chunks: Iterable[bytes]) -> list[str]:
    """Return the column names; none where the file is empty. Raises InputError where they cannot name columns."""
    return _header(name, _reader(name, chunks))


def read_csv(name: str, chunks: Iterable[bytes], first_index: int) -> Iterator[Row]:
    """Yield the rows of one file; a row may span lines, its location is the first one. Blank lines are no rows."""
    reader = _reader(name, chunks)
    names = _header(name, reader)
    index = first_index
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Row(index, f"{name}:{line}", {}, RowError("invalid_csv", _explain(error)))
            index += 1
            continue
        if fields:
            problem = _problem(fields, names)
            yield Row(index, f"{name}:{line}", {} if problem else dict(zip(names, fields, strict=True)), problem)
            index += 1


def _reader(name: str, chunks: Iterable[bytes]) -> _csv.Reader:
    csv.field_size_limit(MAX_LINE_BYTES)  # the module has one limit for all readers, by default too small for prompts
    return csv.reader(_text_lines(name, chunks), strict=True)


def _text_lines(name: str, chunks: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(split_lines(chunks), start=1):
        if line is None:
            raise InputError(f"{name}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
        text = line.decode("utf-8", "surrogateescape")
        yield (text.removeprefix("\ufeff") if number == 1 else text) + "\n"


def _header(name: str, reader: _csv.Reader) -> list[str]:
    try:
        names: list[str] = next((fields for fields in reader if fields), [])
    except csv.Error as error:
        raise InputError(f"{name}: the header line is not CSV: {_explain(error)}") from error
    if "" in names:
        raise InputError(f"{name}: column {names.index('') + 1} has no name", hint="the first line names the columns")
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise InputError(f"{name}: two columns are named {twice!r}", hint="rename one of them")
    if _NOT_UTF8.search("".join(names)):
        raise InputError(f"{name}: the header line is not UTF-8", hint=f"iconv -f WINDOWS-1252 -t UTF-8 {name}")
    return names


def _problem(fields: list[str], names: list[str]) -> RowError | None:
    if len(fields) != len(names):
        return RowError("wrong_field_count", f"{len(fields)} fields where the header has {len(names)}")
    for column, value in zip(names, fields, strict=True):
        if not value.isascii() and _NOT_UTF8.search(value):
            return RowError("invalid_utf8", f"column {column} is not UTF-8")
    return None


def _explain(error: csv.Error) -> str:
    message = str(error)
    if "unexpected end of data" in message:
        return "a quote that is opened here is never closed"
    if "new-line character" in message:
        return "a bare carriage return outside quotes"
    return message
