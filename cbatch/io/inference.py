"""The Arrow types of JSON columns, found over all rows: nulls in the first thousands never lock a type.

Called by jobs before a Parquet output of rows that declare no types. What is kept is one small type per column:
null < bool, string, list, struct and null < int (exact as float) < int64, float; a column of mixed kinds, of integers
beyond 64 bits or of many different keys is JSON text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cbatch.io.arrowform import JSON_TEXT, clean_text

MAX_FIELDS = 256  # leaves of one column; objects used as maps, with keys of their own per row, are text beyond it
MAX_DEPTH = 16  # levels of nesting that are worth a type
_FLOAT_EXACT = 2**53
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class _MixedError(Exception):
    """The values have no common type."""


@dataclass(slots=True)
class _Type:
    """What the values seen so far are: a kind and, for lists and structs, the types inside. Written by `_absorb`."""

    kind: str = "null"
    inner: dict[str, _Type] = field(default_factory=dict)  # list: {"": item type}; struct: by key


class TypeInference:
    """Types of the columns of all rows observed; memory grows with the columns, not with the rows."""

    def __init__(self) -> None:
        self._types: dict[str, _Type | None] = {}  # None: JSON text

    def observe(self, columns: Mapping[str, Any]) -> None:
        """Widen the types so that they hold one more row's values (JSON values or `bytes`)."""
        for name, value in columns.items():
            known = self._types.setdefault(name, _Type())
            if known is None:
                continue
            try:
                _absorb(known, value, 0)
            except _MixedError:
                self._types[name] = None

    def schema(self) -> pa.Schema:
        """Return the columns in the order of their first appearance; lone surrogates in names become U+FFFD."""
        types: dict[str, _Type | None] = {}
        for name, seen in self._types.items():
            clean = clean_text(name)
            types[clean] = None if clean in types else seen  # two that differ by half characters alone
        return pa.schema([_arrow_field(name, seen) for name, seen in types.items()])


def _absorb(known: _Type, value: Any, depth: int) -> None:
    """Widen `known` in place so that it holds `value`. Raises _MixedError."""
    if value is None:
        return
    kind = _kind(value)
    if kind != known.kind:
        known.kind = _join(known.kind, kind)
    if kind == "list":
        _absorb_list(known, value, depth)
    elif kind == "struct":
        _absorb_struct(known, value, depth)


def _absorb_list(known: _Type, value: list[Any], depth: int) -> None:
    item = known.inner.setdefault("", _Type())
    if depth == MAX_DEPTH:
        raise _MixedError
    if set(map(type, value)) == {int}:  # token ids: two looks instead of thousands
        value = [min(value), max(value)]
    for element in value:
        _absorb(item, element, depth + 1)


def _absorb_struct(known: _Type, value: dict[str, Any], depth: int) -> None:
    if depth == MAX_DEPTH:
        raise _MixedError
    for key, element in value.items():
        inner = known.inner.get(key)
        if inner is None:
            if len(known.inner) == MAX_FIELDS or clean_text(key) != key:
                raise _MixedError
            inner = known.inner[key] = _Type()
        _absorb(inner, element, depth + 1)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if -_FLOAT_EXACT <= value <= _FLOAT_EXACT:
            return "int"
        if _INT64_MIN <= value <= _INT64_MAX:
            return "int64"
        raise _MixedError
    if isinstance(value, list | tuple):
        return "list"
    return {float: "float", str: "string", dict: "struct", bytes: "string"}[type(value)]


_JOINS = {("int", "int64"): "int64", ("int", "float"): "float"}


def _join(one: str, other: str) -> str:
    if "null" in (one, other):
        return other if one == "null" else one
    joined = _JOINS.get((one, other)) or _JOINS.get((other, one)) or (one if one == other else None)
    if joined is None:
        raise _MixedError
    return joined


def _arrow_field(name: str, seen: _Type | None) -> pa.Field:
    if seen is None or _has_empty_struct(seen) or _num_leaves(seen) > MAX_FIELDS:
        return pa.field(name, pa.string(), metadata=JSON_TEXT)
    return pa.field(name, _arrow_type(seen))


def _has_empty_struct(seen: _Type) -> bool:
    return (seen.kind == "struct" and not seen.inner) or any(map(_has_empty_struct, seen.inner.values()))


def _num_leaves(seen: _Type) -> int:
    return sum(map(_num_leaves, seen.inner.values())) if seen.inner else 1


def _arrow_type(seen: _Type) -> pa.DataType:
    if seen.kind == "list":
        return pa.list_(_arrow_type(seen.inner[""]))
    if seen.kind == "struct":
        return pa.struct([(key, _arrow_type(inner)) for key, inner in seen.inner.items()])
    return _LEAVES[seen.kind]


# A column of nulls alone is text: readers other than Arrow's know no null type.
_LEAVES = {
    "null": pa.string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "int64": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
}
