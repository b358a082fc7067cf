"""Where in the journal each row's entry is: 8 bytes a row. Written by the writer, read at the end of a job."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

ABSENT = -1
BLOCK_ROWS = 1 << 14  # fixed blocks never move, so growing takes no copy


class RowIndex:
    """Offsets by the number of the row, from `first_row` on."""

    def __init__(self, first_row: int = 0) -> None:
        self._first_row = first_row
        self._blocks: list[array[int]] = []
        self._num_rows = 0

    def __len__(self) -> int:
        """Count the rows up to the last that has an entry."""
        return self._num_rows

    def set(self, row: int, offset: int) -> None:
        """Remember where the entry of a row is."""
        place = row - self._first_row
        while place >= len(self._blocks) * BLOCK_ROWS:
            self._blocks.append(array("q", [ABSENT]) * BLOCK_ROWS)
        self._blocks[place // BLOCK_ROWS][place % BLOCK_ROWS] = offset
        self._num_rows = max(self._num_rows, place + 1)

    def blocks(self) -> Iterator[array[int]]:
        """Yield the offsets of all rows, in order, some at a time."""
        for number, block in enumerate(self._blocks):
            yield block[: self._num_rows - number * BLOCK_ROWS]

    def __iter__(self) -> Iterator[int]:
        """Yield the offsets of all rows in order."""
        for block in self.blocks():
            yield from block

    def sorted(self) -> Iterator[int]:
        """Yield the offsets in the order of the journal; takes another 8 bytes a row."""
        import numpy as np

        offsets = np.empty(self._num_rows, dtype=np.int64)
        for number, block in enumerate(self.blocks()):
            offsets[number * BLOCK_ROWS :][: len(block)] = block
        offsets.sort()
        for start in range(0, self._num_rows, BLOCK_ROWS):
            yield from offsets[start : start + BLOCK_ROWS].tolist()
