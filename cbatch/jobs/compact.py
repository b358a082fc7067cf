"""Hash tables of 64-bit fingerprints in flat arrays: what lets a job know every row within 32 bytes a row.

Used by `ledger`. Python's own sets and dicts take 60 to 150 bytes an entry. Leaves out what the fingerprints are of.
"""

from __future__ import annotations

from array import array

EMPTY = 0  # marks a free slot; a fingerprint of 0 is stored as 1
MAX_LOAD = 0.8
GROWTH = 1.25  # small, so that the slots of a full table are at most 1.6 times its entries
FIRST_SLOTS = 16
PARTITION_BITS = 6  # partitions grow one at a time, so that the copy that growing takes is small
_LOW_BITS = (1 << 32) - 1


class FlatTable:
    """An open-addressing table from a fingerprint to a value of array type `typecode`, or to none."""

    def __init__(self, typecode: str | None, num_entries: int = 0) -> None:
        """Start with room for `num_entries`, exactly."""
        self._typecode = typecode
        self._num_used = 0
        self._allocate(max(FIRST_SLOTS, int(num_entries / MAX_LOAD) + 1))

    def __len__(self) -> int:
        return self._num_used

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(len(slots) * slots.itemsize for slots in (self._keys, self._values) if slots is not None)

    def get(self, fingerprint: int) -> int | None:
        """Return the value stored for a fingerprint (0 in a table without values); None where there is none."""
        slot = self._find(fingerprint or 1)
        if self._keys[slot] == EMPTY:
            return None
        return self._values[slot] if self._values is not None else 0

    def put(self, fingerprint: int, value: int = 0) -> None:
        """Store a fingerprint with its value, in the place of an earlier one."""
        slot = self._find(fingerprint or 1)
        if self._keys[slot] == EMPTY:
            if self._num_used >= len(self._keys) * MAX_LOAD:
                self._grow()
                slot = self._find(fingerprint or 1)
            self._num_used += 1
            self._keys[slot] = fingerprint or 1
        if self._values is not None:
            self._values[slot] = value

    def _allocate(self, num_slots: int) -> None:
        self._keys = array("Q", bytes(8)) * num_slots
        self._values = None
        if self._typecode is not None:
            self._values = array(self._typecode, [0]) * num_slots

    def _find(self, fingerprint: int) -> int:
        """The fingerprint's slot, or the free one where it belongs."""
        keys = self._keys
        num_slots = len(keys)
        slot = (fingerprint & _LOW_BITS) * num_slots >> 32
        while keys[slot] not in (EMPTY, fingerprint):
            slot += 1
            if slot == num_slots:
                slot = 0
        return slot

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._allocate(int(len(keys) * GROWTH) + 1)
        for old, fingerprint in enumerate(keys):
            if fingerprint != EMPTY:
                slot = self._find(fingerprint)
                self._keys[slot] = fingerprint
                if values is not None and self._values is not None:
                    self._values[slot] = values[old]


class PartitionedTable:
    """A `FlatTable` of unknown final size, split by the fingerprints' high bits."""

    def __init__(self, typecode: str | None) -> None:
        self._parts = [FlatTable(typecode) for _ in range(1 << PARTITION_BITS)]

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(part.num_bytes for part in self._parts)

    def get(self, fingerprint: int) -> int | None:
        """As `FlatTable.get`."""
        return self._part(fingerprint).get(fingerprint)

    def put(self, fingerprint: int, value: int = 0) -> None:
        """As `FlatTable.put`."""
        self._part(fingerprint).put(fingerprint, value)

    def _part(self, fingerprint: int) -> FlatTable:
        return self._parts[fingerprint >> 64 - PARTITION_BITS]
