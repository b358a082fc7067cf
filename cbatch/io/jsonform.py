"""The JSON form of a record: one line of UTF-8, exact, and safe for every line-based tool.

Journal and JSONL output are written with `dump_line`, input and journal lines are read with `load`. How Arrow types
(timestamps, decimals, binary, ...) look in this form is `cbatch.io.arrowform`'s.

Python's `json` is used, and not a faster parser, because integers beyond 64 bits must stay exact.
"""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

MAX_NESTING = 128  # levels; deeper values would exhaust the stack of whoever walks them

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# What json leaves raw although str.splitlines() would split there, and what UTF-8 cannot encode.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


def load(text: str, *, max_nesting: int = MAX_NESTING) -> Any:
    """Parse one JSON value. Of keys given twice the last counts. Raises ValueError, and nothing else."""
    if text.count("[") + text.count("{") > max_nesting and _depth(text) > max_nesting:
        raise ValueError(f"nested deeper than {max_nesting} levels")
    return json.loads(text)


def dump(value: Any) -> str:
    """Write one value as JSON text without line breaks: keys in order, NaN and infinities as null, bytes as base64."""
    try:
        return dump_exactly(value)
    except ValueError:
        return dump_exactly(without_non_finite(value))


def dump_exactly(value: Any) -> str:
    """Write one value as `dump` does. Raises ValueError for a number that JSON does not have."""
    text = _ENCODER.encode(value)
    return text if text.isascii() else _ESCAPED.sub(_escape, text)


def dump_line(value: Any) -> bytes:
    """Write one value as a line of UTF-8, its newline included."""
    return dump(value).encode() + b"\n"


def format_utc(seconds: float) -> str:
    """Spell UTC seconds since the epoch in the JSON form of a timestamp: '2026-01-31T12:00:00.250000Z'."""
    return (_EPOCH + timedelta(seconds=seconds)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _base64(value: object) -> str:
    assert isinstance(value, bytes), f"{type(value).__name__} has no JSON form"
    return base64.b64encode(value).decode()


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_base64)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def without_non_finite(value: Any) -> Any:
    """Return a value with null in the place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(item) for item in value]
    return value


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside strings."""
    depth = deepest = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        if token[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in "]}":
            depth -= 1
    return deepest
