"""From the input to rows that know who they are: rendered, with parameters, key, and whether they are finished already.

The first stage of a job. It needs no tokenizer and no model, so a finished job is recognised without loading either.
Leaves out tokenising (`feeder`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cbatch.errors import RowError
from cbatch.io.columns import PREFIX, RESULT_COLUMNS, words_of_row
from cbatch.io.rows import Row
from cbatch.jobs.keys import base_key, failed_key, row_source
from cbatch.jobs.ledger import Claim, Ledger
from cbatch.jobs.params import ParamReader
from cbatch.jobs.rendering import Rendered, Renderer

Interpret = Callable[[Mapping[str, Any]], tuple[dict[str, object], Rendered]]

_OURS = frozenset(column.name for column in RESULT_COLUMNS)


@dataclass(frozen=True, slots=True)
class JobRow:
    """One row of the job: either `rendered` and its parameters, or the `error` that it ends with."""

    row: Row
    source: bytes  # its place and columns, hashed
    claim: Claim
    given: dict[str, object]
    rendered: Rendered | None
    error: RowError | None

    @property
    def index(self) -> int:
        """The row's number over the whole input, from 0."""
        return self.row.index


def plain_rows(params: ParamReader, renderer: Renderer) -> Interpret:
    """Return how a row's columns are read where the row is in cbatch's own form."""
    return lambda columns: (params.read(columns), renderer.render(columns))


class JobReader:
    """Iterates once over the rows of a job, in input order; the attributes are complete once it ended."""

    def __init__(
        self, rows: Iterable[Row], interpret: Interpret, ledger: Ledger, identity: bytes, own: range | None = None
    ) -> None:
        """`own` are the rows of this shard: earlier ones are counted, later ones not read."""
        self._rows = rows
        self._interpret = interpret
        self._ledger = ledger
        self._identity = identity
        self._own = own
        self._digest = hashlib.blake2b(digest_size=16)
        self.colliding_names: set[str] = set()  # the input's columns that are named like ours
        self.asked: set[str] = set()  # words by which rows ask for optional columns

    @property
    def digest(self) -> str:
        """A hash of the keys of all rows so far, in order: the same for the same work, whatever the file's format."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[JobRow]:
        for row in self._rows:
            if self._own is not None and row.index >= self._own.stop:
                return
            job_row = self._read(row)
            if self._own is None or row.index >= self._own.start:
                self._digest.update(job_row.claim.key)
                yield job_row

    def _read(self, row: Row) -> JobRow:
        self.colliding_names.update(name for name in row.columns if is_like_ours(name))
        self.asked |= words_of_row(row.columns)
        given: dict[str, object] = {}
        rendered: Rendered | None = None
        error = row.error
        if error is None:
            try:
                given, rendered = self._interpret(row.columns)
                base = base_key(rendered, given, self._identity)
            except RowError as caught:
                error = caught
        if error is not None:
            error, rendered = RowError(error.code, f"{row.location}: {error.message}"), None
            base = failed_key(error, row.columns, self._identity)
        source = row_source(row.index, row.columns)
        return JobRow(row, source, self._ledger.claim(base, source), given, rendered, error)


def is_like_ours(name: str) -> bool:
    """Whether a column of the input has, or would push one of ours to, a name of ours."""
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    return name in _OURS
