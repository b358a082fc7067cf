"""Which rows the input held so far and which of them are finished, by key, in at most 24 bytes a row.

Filled from the journal at the start, then asked by the feeder for every row in input order, and by nobody else.
"""

from __future__ import annotations

from collections.abc import Callable

from cbatch.jobs.compact import FlatTable, PartitionedTable
from cbatch.jobs.keys import row_key

FINGERPRINT_BYTES = 8


def fingerprint(key: bytes) -> int:
    """Return the first 64 bits of a key."""
    return int.from_bytes(key[:FINGERPRINT_BYTES], "little")


class Ledger:
    """Counts occurrences and hands out finished rows, each once.

    A row takes one slot, in `finished` or in `seen`; only rows that come again take one more, in `repeats`. Two keys
    that share a fingerprint are told apart in `finished` by `verify`; elsewhere they merely count as equal rows,
    which gives the later one another occurrence, the same in every run.
    """

    def __init__(self, num_finished: int = 0, verify: Callable[[int, bytes], bool] | None = None) -> None:
        """Make room for `num_finished` rows; `verify` says whether the journal's entry at an offset has a key."""
        self._finished = FlatTable("q", num_finished)
        self._verify = verify or (lambda _offset, _key: True)
        self._seen = PartitionedTable(None)
        self._repeats = PartitionedTable("I")
        self.num_replayed = 0

    @property
    def num_finished(self) -> int:
        """Rows that the journal held, each counted once."""
        return len(self._finished)

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return self._finished.num_bytes + self._seen.num_bytes + self._repeats.num_bytes

    def add_finished(self, key: bytes, offset: int) -> None:
        """Remember the journal's entry of a finished row; a later one takes the place of an earlier."""
        self._finished.put(fingerprint(key), offset)

    def claim(self, base: bytes) -> tuple[bytes, int | None]:
        """Return the key of the next row with this base key, and where the journal has it if it is finished."""
        occurrence = self._count(base)
        key = row_key(base, occurrence)
        offset = self._find_finished(key)
        if offset is None or offset < 0:
            if occurrence == 0:
                self._seen.put(fingerprint(base))
            return key, None
        self._finished.put(fingerprint(key), ~offset)
        self.num_replayed += 1
        return key, offset

    def _count(self, base: bytes) -> int:
        """How many rows with this base key came before; counts this one."""
        mark = fingerprint(base)
        repeats = self._repeats.get(mark)
        if repeats is None:
            offset = self._find_finished(base)
            is_new = offset >= 0 if offset is not None else self._seen.get(mark) is None
            if is_new:
                return 0
            repeats = 1
        self._repeats.put(mark, repeats + 1)
        return repeats

    def _find_finished(self, key: bytes) -> int | None:
        """The offset of a key's entry; its complement (negative) where the row was claimed already."""
        offset = self._finished.get(fingerprint(key))
        if offset is None or not self._verify(offset if offset >= 0 else ~offset, key):
            return None
        return offset
