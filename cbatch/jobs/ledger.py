"""Which rows the input held so far and which of them are finished, by key, in at most 24 bytes a row.

Filled from the journal at the start, then asked by the reader for every row in input order, and by nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbatch.jobs.compact import FlatTable, PartitionedTable
from cbatch.jobs.keys import row_key

FINGERPRINT_BYTES = 8
_OFFSET_BITS = 46  # 64 TiB of journal
_ATTEMPT_BITS = 14
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_ATTEMPT_MASK = (1 << _ATTEMPT_BITS) - 1
_FAILED = 1 << _OFFSET_BITS + _ATTEMPT_BITS
_RETRY = _FAILED << 1


Verify = Callable[[int, bytes], bool]


def fingerprint(key: bytes) -> int:
    """Return the first 64 bits of a key."""
    return int.from_bytes(key[:FINGERPRINT_BYTES], "little")


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known of a row: its key, where the journal has it if it is finished, and how often it was run so far."""

    key: bytes
    offset: int | None
    num_attempts: int = 0
    ok: bool = True  # whether a finished row did not fail
    moved: bool = False  # whether it stands at another place now, or has other columns, than when it was finished


class Ledger:
    """Counts occurrences and hands out finished rows, each once.

    A row takes one slot, in `_finished` or in `_seen`; only rows that come again take one more, in `_repeats`. Two keys
    that share a fingerprint are told apart in `_finished` by `verify`; elsewhere they merely count as equal rows,
    which gives the later one another occurrence, the same in every run.
    """

    def __init__(self, num_finished: int = 0, verify: Verify | None = None, has_source: Verify | None = None) -> None:
        """Make room for `num_finished` rows.

        `verify` says whether the journal's entry at an offset has a key, `has_source` whether it is of a row that was
        the same in place and columns.
        """
        self._finished = FlatTable("q", num_finished)  # offset, attempts, flags; the complement once claimed
        self._verify = verify or (lambda _offset, _key: True)
        self._has_source = has_source or (lambda _offset, _source: True)
        self._seen = PartitionedTable(None)
        self._repeats = PartitionedTable("I")
        self.num_replayed = 0  # finished rows that the input asked for
        self.num_again = 0  # and those of them that are run again all the same

    def __len__(self) -> int:
        """Count the rows that the journal held, each once."""
        return len(self._finished)

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return self._finished.num_bytes + self._seen.num_bytes + self._repeats.num_bytes

    def forget(self) -> None:
        """Give the memory back; nothing can be asked any more."""
        del self._finished, self._seen, self._repeats

    def add(self, key: bytes, offset: int, attempt: int, *, ok: bool = True, retry: bool = False) -> None:
        """Remember the journal's entry of a row, in the place of an earlier one; `retry` has it run again."""
        flags = (0 if ok else _FAILED) | (_RETRY if retry else 0)
        self._finished.put(fingerprint(key), offset | min(attempt, _ATTEMPT_MASK) << _OFFSET_BITS | flags)

    def claim(self, base: bytes, source: bytes = b"") -> Claim:
        """Give the next row with this base key its key, and what the journal holds of it.

        A row that failed is run again once its `source` is another: the message of its error names its old place.
        """
        mark = fingerprint(base)
        repeats = self._repeats.get(mark)
        if repeats is None:
            entry = self._find(base)
            if entry is None and self._seen.get(mark) is None:
                self._seen.put(mark)
                return Claim(base, None)
            if entry is not None and entry >= 0:
                return self._take(base, entry, source)
            repeats = 1
        self._repeats.put(mark, repeats + 1)
        key = row_key(base, repeats)
        entry = self._find(key)
        return Claim(key, None) if entry is None or entry < 0 else self._take(key, entry, source)

    def _take(self, key: bytes, entry: int, source: bytes) -> Claim:
        """Hand out an entry of the journal; it is not there a second time."""
        self._finished.put(fingerprint(key), ~entry)
        offset, num_attempts = entry & _OFFSET_MASK, entry >> _OFFSET_BITS & _ATTEMPT_MASK
        moved = not self._has_source(offset, source)
        if entry & _RETRY or (moved and entry & _FAILED):
            self.num_again += 1
            return Claim(key, None, num_attempts)
        self.num_replayed += 1
        return Claim(key, offset, num_attempts, ok=not entry & _FAILED, moved=moved)

    def _find(self, key: bytes) -> int | None:
        """The journal's entry of a key; its complement (negative) where the row was claimed already."""
        entry = self._finished.get(fingerprint(key))
        if entry is None or not self._verify((entry if entry >= 0 else ~entry) & _OFFSET_MASK, key):
            return None
        return entry
