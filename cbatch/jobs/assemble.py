"""The end of a job: the journal's entries, in the order asked for, become the output file. Called by run and merge."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cbatch.io.columns import merge_record, output_names
from cbatch.io.sinks import open_sink
from cbatch.jobs.journal import Entry, Journal
from cbatch.jobs.totals import Targets, Totals
from cbatch.jobs.writer import ABSENT

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Layout:
    """How the output looks: where it goes, its order and its columns."""

    path: Path
    order: Literal["input", "completion"]
    return_token_ids: bool
    schema: pa.Schema | None  # of the input's columns where it declares one
    colliding_names: frozenset[str]  # columns of the input that are named like ours

    @property
    def names(self) -> dict[str, str]:
        """Our columns and what they are called in the output."""
        return output_names(sorted(self.colliding_names), token_ids=self.return_token_ids)


def content_digest(layout: Layout, offsets: array[int], rows_digest: str) -> str:
    """Hash what decides over the output's content: which entries, in which order, in which columns."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((layout.path.suffix, layout.order, sorted(layout.names.items()), rows_digest)).encode())
    digest.update(memoryview(offsets))
    return digest.hexdigest()


def assemble(
    journal: Journal, offsets: array[int], layout: Layout, targets: Targets, tick: Callable[[int], None]
) -> Totals:
    """Write the output and let it appear, complete; `tick` is called with the number of every row.

    Raises OutputError; whatever `tick` raises leaves no output either.
    """
    assert ABSENT not in offsets, "a row has no entry"
    totals = Totals(targets)
    names = layout.names
    with open_sink(str(layout.path), _record_schema(journal, offsets, layout, tick)) as sink:
        for number, entry in enumerate(_entries(journal, offsets, layout)):
            tick(number)
            totals.add(entry)
            sink.write(merge_record(entry.columns, entry.result, names))
        sink.commit()
    return totals


def add_up(
    journal: Journal, offsets: array[int], layout: Layout, targets: Targets, tick: Callable[[int], None]
) -> Totals:
    """Compute the totals of an output that is there already."""
    totals = Totals(targets)
    for number, entry in enumerate(_entries(journal, offsets, layout)):
        tick(number)
        totals.add(entry)
    return totals


def _entries(journal: Journal, offsets: array[int], layout: Layout) -> Iterator[Entry]:
    if layout.order == "completion":
        import numpy as np

        offsets = array("q", np.sort(np.frombuffer(offsets, dtype=np.int64)).tobytes() if offsets else b"")
    for offset in offsets:
        yield journal.read(offset)


def _record_schema(
    journal: Journal, offsets: array[int], layout: Layout, tick: Callable[[int], None]
) -> pa.Schema | None:
    """The records' Arrow types: declared, or for Parquet found in a first pass over all rows."""
    declared = layout.schema
    if layout.path.suffix.lower() != ".parquet" and declared is None:
        return None
    from cbatch.io.schema import output_schema

    if declared is None:
        from cbatch.io.inference import TypeInference

        inference = TypeInference()
        for number, offset in enumerate(offsets):
            tick(number)
            inference.observe(journal.read(offset).columns)
        declared = inference.schema()
    return output_schema(declared, layout.names)
