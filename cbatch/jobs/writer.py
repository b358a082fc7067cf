"""The writer: one thread that turns finished rows into journal entries and knows where each row's entry is.

Fed by the feeder (rows that failed or were finished before) and by the step loop (rows that the engine finished). It is
the only one to write the journal and the index. A failure to write is kept, and seen by whoever looks next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cbatch.jobs.journal import SYNC_INTERVAL_S, Entry, Journal
from cbatch.jobs.reader import JobRow
from cbatch.jobs.rowindex import RowIndex

MAX_QUEUED = 1024  # finished rows on their way to the disk; then their makers wait


@dataclass(frozen=True, slots=True)
class Tally:
    """Rows that have an entry, counted."""

    num_ok: int = 0
    num_errors: int = 0
    num_replayed: int = 0  # of these, the ones that an earlier session finished

    @property
    def num_rows(self) -> int:
        return self.num_ok + self.num_errors


class Writer:
    """A thread around a journal; `close` ends it once everything handed in is durable."""

    def __init__(self, journal: Journal, index: RowIndex) -> None:
        self._journal = journal
        self._reader = journal.reader()
        self._index = index
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="cbatch-writer", daemon=True)
        self.tally = Tally()
        self.failure: BaseException | None = None
        self._thread.start()

    def write(self, row: int, make_entry: Callable[[], Entry]) -> None:
        """Hand in a finished row; `make_entry` runs on the writer's thread."""
        self._queue.put(lambda: self._write(row, make_entry()))

    def replay(self, row: JobRow) -> None:
        """Hand in a row that the journal has already."""
        self._queue.put(lambda: self._replay(row))

    def note(self, session: int, facts: dict[str, Any]) -> None:
        """Hand in what a session says of itself."""
        self._queue.put(lambda: self._journal.note_session(session, facts))

    def check(self) -> None:
        """Raise what made writing fail."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Wait until all is written and durable. Raises what made writing fail."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self.check()

    def _run(self) -> None:
        closing = False
        while not closing:
            try:
                task = self._queue.get(timeout=SYNC_INTERVAL_S)
            except queue.Empty:
                task = _nothing
            closing = task is None
            if self.failure is not None:
                continue  # nothing can be written any more, yet nobody must wait for room in the queue
            try:
                if task is not None:
                    task()
                    self._journal.keep_up(idle=self._queue.empty())
                else:
                    self._journal.sync()
            except BaseException as error:
                self.failure = error

    def _write(self, row: int, entry: Entry) -> None:
        self._index.set(row, self._journal.append(entry))
        self._count(ok=entry.head.ok)

    def _replay(self, row: JobRow) -> None:
        offset = row.claim.offset
        assert offset is not None
        if row.claim.moved:  # the answer is the same, what the output shows of the input is not
            entry = self._reader.read(offset)
            head, result = replace(entry.head, source=row.source), entry.result | {"row": row.index}
            offset = self._journal.append(Entry(head, row.row.columns, result))
        self._index.set(row.index, offset)
        self._count(ok=row.claim.ok, replayed=True)

    def _count(self, *, ok: bool, replayed: bool = False) -> None:
        tally = self.tally
        self.tally = Tally(tally.num_ok + ok, tally.num_errors + (not ok), tally.num_replayed + replayed)


def _nothing() -> None:
    """Stands for an empty queue: it is time to look whether a sync is due."""
