"""The input of a job: file names in, one stream of rows out. Called by jobs; each format is an entry in one table.

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
from cbatch.io.streams import STDIN, read_chunks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Source:
    """Every row of the given inputs, in their order. Iterating again reads again (standard input only once)."""

    inputs: tuple[str, ...]  # the files, globs expanded
    schema: pa.Schema | None = None  # the columns' Arrow types where the input declares them (Parquet); else None

    def __iter__(self) -> Iterator[Row]:
        index = 0
        for name in self.inputs:
            for row in _read(name, index):
                yield row
                index = row.index + 1


@dataclass(frozen=True, slots=True)
class Format:
    """How files of some suffixes are read: (name, index of the first row) → rows."""

    suffixes: tuple[str, ...]
    read: Callable[[str, int], Iterator[Row]]


def _read_jsonl_file(name: str, first_index: int) -> Iterator[Row]:
    return read_jsonl("stdin" if name == STDIN else name, read_chunks(name), first_index)


FORMATS = (Format((".jsonl", ".ndjson", ".json"), _read_jsonl_file),)


def open_source(inputs: Sequence[str]) -> Source:
    """Find the inputs and check that they can be read. Raises UsageError for those that cannot."""
    for name in inputs:
        if name != STDIN and not Path(name).exists():
            raise UsageError(f"no such input: {name}")
    return Source(tuple(inputs))


def _read(name: str, first_index: int) -> Iterator[Row]:
    return FORMATS[0].read(name, first_index)
