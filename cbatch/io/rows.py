"""One row of the input, good or bad. Made by the sources, read by the job; a bad row is a value, never an exception."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbatch.errors import RowError


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the whole input.

    `columns` holds JSON values (str, int, float, bool, None, list, dict), whatever the format, plus `bytes` for binary
    Parquet columns; it is empty where the row could not be read, and `error` says why.
    """

    index: int  # 0-based, counted over every file of the input, unreadable rows included
    location: str  # for messages: "prompts.jsonl:12" (the physical line) or "prompts.parquet[11]" (the 0-based row)
    columns: dict[str, Any]
    error: RowError | None = None
