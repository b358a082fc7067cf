"""Arrow values in their JSON form and back without loss: one codec for Parquet input, the journal and Parquet output.

| Arrow type                       | JSON form                                                        |
|----------------------------------|------------------------------------------------------------------|
| timestamp                        | ISO 8601 with the unit's digits, "Z" where it has a time zone    |
| date, time                       | ISO 8601                                                         |
| (of years outside 1 to 9999)     | integer, in the type's unit                                      |
| duration                         | integer, in the type's unit                                      |
| decimal                          | string of its digits                                             |
| float NaN, infinities            | "NaN", "Infinity", "-Infinity"; null in JSONL output             |
| binary                           | base64; `bytes` in memory                                        |
| map                              | array of [key, value]                                            |
| dictionary                       | its value                                                        |
| the rest                         | as JSON has it                                                   |
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from cbatch.errors import OutputError
from cbatch.io.jsonform import dump

JSON_TEXT = {b"cbatch.json": b"1"}  # metadata of a string field that holds any value as JSON text

Convert = Callable[[Any], Any]
LeafRule = Callable[[pa.DataType], Convert | None]  # None: values of this type stay as they are

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH = datetime(1970, 1, 1)
_DAY_MS = 86_400_000


def to_json(array: pa.Array) -> list[Any]:
    """Return the values of a column in their JSON form, binary as `bytes`. Raises UnicodeDecodeError for bad text."""
    storage = _storage_type(array.type)
    values: list[Any] = (array if array.type == storage else array.cast(storage)).to_pylist()
    encode = _lift(array.type, _encoder)
    return values if encode is None else [encode(value) for value in values]


def from_json(values: list[Any], field: pa.Field) -> pa.Array:
    """Build a column of `field` from the JSON form; lone surrogates become U+FFFD.

    Raises OutputError for a value that does not fit the type.
    """
    if is_json_text(field):
        return pa.array([None if value is None else dump(value) for value in values], field.type)
    decode = _lift(field.type, _decoder)
    try:
        if decode is not None:
            values = [decode(value) for value in values]
        try:
            return pa.array(values, field.type)
        except (UnicodeEncodeError, pa.ArrowTypeError):  # rare, so looked for only where Arrow complains
            clean = _lift(field.type, _text_cleaner) or _same
            return pa.array([clean(value) for value in values], field.type)
    except (pa.ArrowException, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise OutputError(f"column {field.name}: a value does not fit its type {field.type}: {error}") from error


def is_json_text(field: pa.Field) -> bool:
    """Whether a column holds values of any kind as JSON text."""
    return bool(field.metadata and JSON_TEXT.items() <= field.metadata.items())


def replace_non_finite(kind: pa.DataType, replace: Callable[[str], float | None]) -> Convert | None:
    """Return what replaces NaN and infinities, which a column's JSON form names, or None where the type holds none."""

    def rule(leaf: pa.DataType) -> Convert | None:
        return (lambda value: replace(value) if isinstance(value, str) else value) if pat.is_floating(leaf) else None

    return _lift(kind, rule)


def clean_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot hold, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _lift(kind: pa.DataType, rule: LeafRule) -> Convert | None:
    """Apply a rule for leaves to a whole, perhaps nested, type; nulls stay null at every level."""
    convert: Convert | None
    if pat.is_struct(kind):
        fields = {field.name: _lift(field.type, rule) for field in kind}
        changed = {name: inner for name, inner in fields.items() if inner is not None}
        convert = (lambda value: {k: changed.get(k, _same)(v) for k, v in value.items()}) if changed else None
    elif pat.is_map(kind):
        key, item = _lift(kind.key_type, rule) or _same, _lift(kind.item_type, rule) or _same
        convert = lambda value: [(key(k), item(v)) for k, v in value]  # noqa: E731 pyarrow insists on tuples
    elif _is_list(kind):
        inner = _lift(kind.value_type, rule)
        convert = None if inner is None else lambda value: [inner(item) for item in value]
    elif pat.is_dictionary(kind):
        return _lift(kind.value_type, rule)
    else:
        convert = rule(kind)
    return None if convert is None else lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _is_list(kind: pa.DataType) -> bool:
    views = pat.is_list_view(kind) or pat.is_large_list_view(kind)
    return bool(pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind) or views)


def _encoder(kind: pa.DataType) -> Convert | None:
    """The rule from storage values (see `_storage_type`) to JSON."""
    if pat.is_timestamp(kind):
        return lambda value: _format_timestamp(value, kind)
    if pat.is_date(kind):
        scale = _DAY_MS if pat.is_date64(kind) else 1
        return lambda value: _format_date(value, scale)
    if pat.is_time(kind):
        return lambda value: _format_time(value, _PER_SECOND[kind.unit])
    if pat.is_decimal(kind):
        return lambda value: format(value, "f")
    if pat.is_floating(kind):
        return lambda value: value if math.isfinite(value) else _non_finite_name(value)
    return None


def _decoder(kind: pa.DataType) -> Convert | None:
    """The rule from JSON to what `pa.array` takes for the type."""
    if pat.is_timestamp(kind):
        return lambda value: _parse_timestamp(value, _PER_SECOND[kind.unit]) if isinstance(value, str) else value
    if pat.is_date(kind):
        scale = _DAY_MS if pat.is_date64(kind) else 1
        return lambda value: (
            (date.fromisoformat(value) - _EPOCH.date()).days * scale if isinstance(value, str) else value
        )
    if pat.is_time(kind):
        return lambda value: _parse_timestamp(f"1970-01-01T{value}", _PER_SECOND[kind.unit])
    if pat.is_decimal(kind):
        return Decimal
    if pat.is_floating(kind):
        return float
    if _is_binary(kind):
        return lambda value: base64.b64decode(value) if isinstance(value, str) else value
    return None


def _text_cleaner(kind: pa.DataType) -> Convert | None:
    """The rule that makes text acceptable to Arrow; a number in a text column (`stop_reason`) becomes its digits."""
    if pat.is_string(kind) or pat.is_large_string(kind) or pat.is_string_view(kind):
        return lambda value: clean_text(value if isinstance(value, str) else dump(value))
    return None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_fixed_size_binary(kind) or pat.is_binary_view(kind)
    )


def _storage_type(kind: pa.DataType) -> pa.DataType:
    """The type whose Python values are exact and need neither pandas nor time zone data: times as integers."""
    if pat.is_timestamp(kind) or pat.is_date64(kind) or pat.is_time64(kind) or pat.is_duration(kind):
        return pa.int64()
    if pat.is_date32(kind) or pat.is_time32(kind):
        return pa.int32()
    if pat.is_float16(kind):
        return pa.float32()
    return map_inner_types(kind, _storage_type)


def map_inner_types(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Rebuild a nested type with its inner types changed; dictionaries become their values, list views lists."""
    if pat.is_dictionary(kind):
        return change(kind.value_type)
    if pat.is_struct(kind):
        return pa.struct([field.with_type(change(field.type)) for field in kind])
    if pat.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(change(kind.key_type)), kind.item_field.with_type(change(kind.item_type))
        )
    if not _is_list(kind):
        return kind
    inner = kind.value_field.with_type(change(kind.value_type))
    if pat.is_large_list(kind) or pat.is_large_list_view(kind):
        return pa.large_list(inner)
    return pa.list_(inner, kind.list_size) if pat.is_fixed_size_list(kind) else pa.list_(inner)


def _format_timestamp(value: int, kind: pa.DataType) -> str | int:
    per_second = _PER_SECOND[kind.unit]
    seconds, fraction = divmod(value, per_second)
    try:
        text = (_EPOCH + timedelta(seconds=seconds)).isoformat()
    except OverflowError:
        return value
    return text + _format_fraction(fraction, per_second) + ("Z" if kind.tz is not None else "")


def _format_date(value: int, scale: int) -> str | int:
    days, rest = divmod(value, scale)
    try:
        return value if rest else (_EPOCH.date() + timedelta(days=days)).isoformat()
    except OverflowError:
        return value


def _format_time(value: int, per_second: int) -> str:
    seconds, fraction = divmod(value, per_second)
    return (_EPOCH + timedelta(seconds=seconds)).time().isoformat() + _format_fraction(fraction, per_second)


def _format_fraction(fraction: int, per_second: int) -> str:
    return f".{str(per_second + fraction)[1:]}" if per_second > 1 else ""


def _parse_timestamp(text: str, per_second: int) -> int:
    whole, _, fraction = text.removesuffix("Z").partition(".")
    elapsed = datetime.fromisoformat(whole) - _EPOCH
    return (elapsed.days * 86_400 + elapsed.seconds) * per_second + int(fraction or 0)


def _non_finite_name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
