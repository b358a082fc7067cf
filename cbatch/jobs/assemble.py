"""The end of a job: the journal's entries, in the order asked for, become the output file. Called by `run`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cbatch.io.columns import merge_record, output_names
from cbatch.io.sinks import open_sink
from cbatch.jobs.journal import Entry, Journal
from cbatch.jobs.openai import to_response
from cbatch.jobs.paths import errors_path
from cbatch.jobs.rowindex import ABSENT, RowIndex
from cbatch.jobs.totals import Totals

if TYPE_CHECKING:
    import pyarrow as pa

Tick = Callable[[], None]  # called once per row; whatever it raises leaves no output


@dataclass(frozen=True, slots=True)
class Layout:
    """How the output looks: where it goes, its order and its columns."""

    path: Path
    order: Literal["input", "completion"]
    asked: frozenset[str]  # words that ask for optional columns
    keep_columns: tuple[str, ...] | None
    schema: pa.Schema | None  # of the input's columns where it is known
    colliding_names: frozenset[str]  # columns of the input that are named like ours
    openai: bool = False  # responses of the OpenAI Batch format instead of columns

    @property
    def names(self) -> dict[str, str]:
        """Our columns and what they are called in the output."""
        theirs = sorted(name for name in self.colliding_names if self.keeps(name))
        return output_names(theirs, self.asked)

    def keeps(self, name: str) -> bool:
        """Whether a column of the input is in the output."""
        return self.keep_columns is None or name in self.keep_columns

    def kept(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of the input that are in the output."""
        return columns if self.keep_columns is None else {k: v for k, v in columns.items() if self.keeps(k)}


def columns_digest(layout: Layout) -> str:
    """Hash the names and types of the output's columns, as far as they are known."""
    look = (layout.path.suffix, sorted(layout.names.items()), layout.keep_columns, layout.openai, str(layout.schema))
    return hashlib.blake2b(repr(look).encode(), digest_size=16).hexdigest()


def content_digest(layout: Layout, index: RowIndex, rows_digest: str) -> str:
    """Hash what decides over the output's content: which entries, in which order, in which columns."""
    look = (columns_digest(layout), layout.order, rows_digest)
    digest = hashlib.blake2b(repr(look).encode(), digest_size=16)
    for block in index.blocks():
        digest.update(memoryview(block))
    return digest.hexdigest()


def assemble(journal: Journal, index: RowIndex, layout: Layout, totals: Totals, tick: Tick) -> None:
    """Write the output and let it appear, complete; every entry is added to `totals`. Raises OutputError."""
    totals.columns_not_found = set(layout.keep_columns or ())
    assert all(ABSENT not in block for block in index.blocks()), "a row has no entry"
    if layout.openai:
        _assemble_responses(journal, index, layout, totals, tick)
        return
    names = layout.names
    with open_sink(str(layout.path), _record_schema(journal, index, layout, tick)) as sink:
        for entry in _entries(journal, index, layout, tick):
            totals.add(entry)
            # An earlier run may have been asked for more columns than this output has.
            result = {name: value for name, value in entry.result.items() if name in names}
            sink.write(merge_record(layout.kept(entry.columns), result, names))
        totals.rows_nulled += sink.num_nulled
        sink.commit()


def _assemble_responses(journal: Journal, index: RowIndex, layout: Layout, totals: Totals, tick: Tick) -> None:
    """Write responses and, where there are any, failures to a file of their own, which appears first."""
    with ExitStack() as sinks:
        answers = sinks.enter_context(open_sink(str(layout.path)))
        failures = errors_path(layout.path)
        errors = sinks.enter_context(open_sink(str(failures)))
        for entry in _entries(journal, index, layout, tick):
            totals.add(entry)
            line, failed = to_response(entry)
            (errors if failed else answers).write(line)
        if totals.rows_error:
            errors.commit()
        else:
            failures.unlink(missing_ok=True)
        answers.commit()


def _entries(journal: Journal, index: RowIndex, layout: Layout, tick: Tick) -> Iterator[Entry]:
    reader = journal.reader()
    for offset in index.sorted() if layout.order == "completion" else index:
        tick()
        yield reader.read(offset)


def _record_schema(journal: Journal, index: RowIndex, layout: Layout, tick: Tick) -> pa.Schema | None:
    """The records' Arrow types: declared, or for Parquet found in a first pass over all rows."""
    declared = layout.schema
    if layout.path.suffix.lower() != ".parquet" and declared is None:
        return None
    import pyarrow as pa

    from cbatch.io.inference import TypeInference
    from cbatch.io.schema import output_schema

    if declared is None:
        inference, reader = TypeInference(), journal.reader()
        for offset in index:
            tick()
            inference.observe(reader.read(offset).columns)
        declared = inference.schema()
    declared = pa.schema([field for field in declared if layout.keeps(field.name)])
    return output_schema(declared, layout.names)
