"""How many rows the input will have, for the bar and the time left; found on the side while the job runs.

Nothing for what can be read only once or would have to be fetched.
"""

from __future__ import annotations

import threading
from pathlib import Path

from cbatch.errors import CbatchError
from cbatch.io import jsonl
from cbatch.io.sources import JSONL, FilePart, Part, Source
from cbatch.io.streams import read_chunks

PARQUET_MAGIC = b"PAR1"
COUNT_BYTES = 1 << 16  # read at a time, little beside what reading the rows takes


class RowCount:
    """The number of rows in the input, counted on a thread of its own."""

    def __init__(self, source: Source, limit: int | None) -> None:
        self._source = source
        self._limit = limit
        self.value: int | None = None  # None until it is known, and for good where it cannot be

    def start(self) -> None:
        """Begin to count."""
        threading.Thread(target=self._run, name="cbatch-counter", daemon=True).start()

    def _run(self) -> None:
        total = 0
        for part in self._source.parts:
            try:
                num_rows = count_rows(part)
            except (CbatchError, OSError):  # whoever reads the rows says so
                return
            if num_rows is None:
                return
            total += num_rows
            if self._limit is not None and total >= self._limit:
                break
        self.value = total if self._limit is None else min(total, self._limit)


def count_rows(part: Part) -> int | None:
    """Count the rows of a local file without parsing them; None where that cannot be done."""
    if not isinstance(part, FilePart) or not Path(part.name).is_file():
        return None
    if part.format.magic == PARQUET_MAGIC:
        import pyarrow.parquet as pq

        return int(pq.read_metadata(part.name).num_rows)
    if part.format is not JSONL:
        return None
    return jsonl.count_rows(read_chunks(part.name, COUNT_BYTES))
