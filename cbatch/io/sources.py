"""The input of a job: names in, one stream of rows out. Called by jobs; each format is an entry in one table.

Errors of single rows are rows (`Row.error`); an input that cannot be read, or not to its end, raises InputError after
the good rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import UsageError
from cbatch.io.jsonl import read_jsonl
from cbatch.io.rows import Row
from cbatch.io.streams import STDIN, open_binary, read_chunks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one format are told and read."""

    name: str
    suffixes: tuple[str, ...]
    magic: bytes | None  # the first bytes, which win over the suffix
    read: Callable[[str, int, pa.Schema | None], Iterator[Row]]  # name, index of the first row, schema of all inputs
    schema: Callable[[str], pa.Schema] | None  # of one file, where the format declares one


@dataclass(frozen=True, slots=True)
class Source:
    """Every row of the inputs, in their order. Iterating again reads again (standard input only once).

    `schema` holds the columns' Arrow types where every input declares them (Parquet) and they agree, else None.
    """

    parts: tuple[tuple[str, Format], ...]  # (name, format), globs expanded
    schema: pa.Schema | None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all files."""
        return tuple(name for name, _ in self.parts)

    def __iter__(self) -> Iterator[Row]:
        index = 0
        for name, form in self.parts:
            for row in form.read(name, index, self.schema):
                yield row
                index = row.index + 1


def _read_jsonl(name: str, first_index: int, _schema: pa.Schema | None) -> Iterator[Row]:
    return read_jsonl("stdin" if name == STDIN else name, read_chunks(name), first_index)


def _read_parquet(name: str, first_index: int, schema: pa.Schema | None) -> Iterator[Row]:
    from cbatch.io.parquet import read_parquet

    return read_parquet(name, first_index, schema)


def _parquet_schema(name: str) -> pa.Schema:
    from cbatch.io.parquet import read_schema

    return read_schema(name)


JSONL = Format("JSON lines", (".jsonl", ".ndjson", ".json"), None, _read_jsonl, None)
PARQUET = Format("Parquet", (".parquet", ".pq"), b"PAR1", _read_parquet, _parquet_schema)
FORMATS = (JSONL, PARQUET)


def open_source(inputs: Sequence[str]) -> Source:
    """Find the inputs, check that they can be read and tell their formats.

    Raises UsageError for a name that cannot be an input, InputError for a file that cannot be read.
    """
    parts = tuple((name, _format(name)) for name in inputs)
    return Source(parts, _common_schema(parts))


def _format(name: str) -> Format:
    """Tell the format of one input."""
    if name == STDIN:
        return JSONL
    path = Path(name)
    if not path.exists():
        raise UsageError(f"no such input: {name}")
    if path.is_dir():
        raise UsageError(f"the input {name} is a directory", hint=f"name the files in it: '{name}/*.jsonl'")
    if path.is_file():  # a pipe's first bytes can be read only once
        with open_binary(name) as stream:
            head = stream.peek(8)
        for form in FORMATS:
            if form.magic is not None and head.startswith(form.magic):
                return form
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".zst")]
    for form in FORMATS:
        if suffixes and suffixes[-1] in form.suffixes:
            return form
    raise UsageError(f"cannot tell the format of the input {name}")


def _common_schema(parts: Sequence[tuple[str, Format]]) -> pa.Schema | None:
    """The schema that holds every part's columns, where all declare theirs and they can be unified."""
    schemas = []
    for name, form in parts:
        if form.schema is None:
            return None
        schemas.append(form.schema(name))
    if len(schemas) == 1:
        return schemas[0]
    import pyarrow as pa

    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException:
        return None
