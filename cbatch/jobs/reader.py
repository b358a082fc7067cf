"""From the input to rows that know who they are: rendered, with parameters, key, and whether they are finished already.

The first stage of a job. It needs no tokenizer and no model, so a finished job is recognised without loading either.
Leaves out tokenising (`feeder`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cbatch.errors import RowError
from cbatch.io.columns import PREFIX, RESULT_COLUMNS
from cbatch.io.rows import Row
from cbatch.jobs.keys import base_key, failed_key
from cbatch.jobs.ledger import Claim, Ledger
from cbatch.jobs.params import ParamReader
from cbatch.jobs.rendering import Rendered, Renderer

_OURS = frozenset(column.name for column in RESULT_COLUMNS)


@dataclass(frozen=True, slots=True)
class JobRow:
    """One row of the job: either `rendered` and its parameters, or the `error` that it ends with."""

    row: Row
    claim: Claim
    given: dict[str, object]
    rendered: Rendered | None
    error: RowError | None

    @property
    def index(self) -> int:
        """The row's number over the whole input, from 0."""
        return self.row.index


class JobReader:
    """Iterates once over the rows of a job, in input order; the attributes are complete once it ended."""

    def __init__(self, rows: Iterable[Row], renderer: Renderer, params: ParamReader, ledger: Ledger, identity: bytes):
        self._rows = rows
        self._renderer = renderer
        self._params = params
        self._ledger = ledger
        self._identity = identity
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_rows = 0
        self.exhausted = False
        self.colliding_names: set[str] = set()  # the input's columns that are named like ours

    @property
    def digest(self) -> str:
        """A hash of the keys of all rows so far, in order: the same for the same work, whatever the file's format."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[JobRow]:
        for row in self._rows:
            job_row = self._read(row)
            self.num_rows += 1
            self._digest.update(job_row.claim.key)
            yield job_row
        self.exhausted = True

    def _read(self, row: Row) -> JobRow:
        self.colliding_names.update(name for name in row.columns if _is_like_ours(name))
        given: dict[str, object] = {}
        rendered: Rendered | None = None
        error = row.error
        if error is None:
            try:
                given = self._params.read(row.columns)
                rendered = self._renderer.render(row.columns)
                base = base_key(rendered, given, self._identity)
            except RowError as caught:
                error = caught
        if error is not None:
            error, rendered = RowError(error.code, f"{row.location}: {error.message}"), None
            base = failed_key(error, row.columns, self._identity)
        return JobRow(row, self._ledger.claim(base), given, rendered, error)


def _is_like_ours(name: str) -> bool:
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    return name in _OURS
