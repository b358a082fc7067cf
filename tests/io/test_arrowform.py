"""Arrow values in JSON and back: nothing is lost on the way from Parquet over the journal to Parquet (spec I4)."""

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.errors import OutputError
from cbatch.io.arrowform import from_json, replace_non_finite, to_json
from cbatch.io.jsonform import dump, load

int64s = st.integers(-(2**63), 2**63 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
DAY = 86_400
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), int64s),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), st.floats(width=16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), st.text()),
    (pa.large_string(), st.text()),
    (pa.string_view(), st.text()),
    (pa.binary(), st.binary()),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.large_binary(), st.binary()),
    (pa.decimal128(38, 10), st.decimals(-(10**20), 10**20, places=10)),
    (pa.decimal128(5, -2), st.integers(-999, 999).map(lambda n: Decimal(n * 100))),
    (pa.decimal256(60, 4), st.decimals(-(10**20), 10**20, places=4)),
    (pa.date32(), int32s),
    (pa.date64(), int32s.map(lambda days: days * DAY * 1000)),
    (pa.time32("s"), st.integers(0, DAY - 1)),
    (pa.time32("ms"), st.integers(0, DAY * 10**3 - 1)),
    (pa.time64("us"), st.integers(0, DAY * 10**6 - 1)),
    (pa.time64("ns"), st.integers(0, DAY * 10**9 - 1)),
    *((pa.timestamp(unit, zone), int64s) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Paris")),
    *((pa.duration(unit), int64s) for unit in ("s", "ns")),
    (pa.dictionary(pa.int32(), pa.string()), st.text()),
    (pa.null(), st.none()),
]


def nested(kind: pa.DataType) -> list[pa.DataType]:
    """Types with `kind` inside."""
    if pa.types.is_dictionary(kind):
        return []  # a portable schema has dictionaries at the top only
    return [
        pa.list_(kind),
        pa.large_list(kind),
        pa.list_(kind, 1),
        pa.struct([("x", kind), ("y", pa.int64())]),
        pa.map_(pa.string(), kind),
    ]


def wrap(value: Any, kind: pa.DataType) -> Any:
    """A value of a type made by `nested`."""
    if pa.types.is_struct(kind):
        return {"x": value, "y": 1}
    return [("key", value), ("key", value)] if pa.types.is_map(kind) else [value]


def round_trip(array: pa.Array) -> pa.Array:
    """To the journal's line and back."""
    return from_json(load(dump(to_json(array))), pa.field("column", array.type))


def same(one: pa.Array, other: pa.Array) -> bool:
    """Equality in which NaN equals NaN."""
    if "float" in str(one.type) or "double" in str(one.type):
        return one.type == other.type and repr(one.to_pylist()) == repr(other.to_pylist())
    return bool(one.equals(other))


@pytest.mark.parametrize(("kind", "strategy"), LEAVES, ids=lambda value: str(value)[:40])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_value_comes_back(kind: pa.DataType, strategy: st.SearchStrategy[Any], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | strategy, max_size=5))
    array = pa.array(values, kind)
    assert same(round_trip(array), array)
    for outer in nested(kind):
        array = pa.array([None, *(wrap(value, outer) for value in values)], outer)
        assert same(round_trip(array), array)


@pytest.mark.parametrize(
    ("kind", "value", "form"),
    [
        (pa.timestamp("us", "UTC"), 250_000, '"1970-01-01T00:00:00.250000Z"'),
        (pa.timestamp("ns"), -1, '"1969-12-31T23:59:59.999999999"'),
        (pa.timestamp("s"), 0, '"1970-01-01T00:00:00"'),
        (pa.timestamp("s"), 2**60, str(2**60)),  # no year of four digits
        (pa.date32(), 20_000, '"2024-10-04"'),
        (pa.time64("us"), 3_661_000_001, '"01:01:01.000001"'),
        (pa.duration("ms"), 1500, "1500"),
        (pa.decimal128(10, 2), Decimal("1.50"), '"1.50"'),
        (pa.decimal128(5, -2), Decimal(100), '"100"'),
        (pa.float64(), math.nan, '"NaN"'),
        (pa.float32(), -math.inf, '"-Infinity"'),
        (pa.float32(), 0.5, "0.5"),
        (pa.binary(), b"\x00\xff", '"AP8="'),
        (pa.int64(), 9007199254740993, "9007199254740993"),
        (pa.map_(pa.string(), pa.int64()), [("a", 1), ("a", 2)], '[["a", 1], ["a", 2]]'),
        (pa.list_(pa.date32()), [0, None], '["1970-01-01", null]'),
    ],
    ids=str,
)
def test_the_form_is_the_documented_one(kind: pa.DataType, value: Any, form: str) -> None:
    assert dump(to_json(pa.array([value, None], kind))) == f"[{form}, null]"


def test_lone_surrogates_become_the_replacement_character() -> None:
    assert from_json(["a\ud83db", "fine"], pa.field("x", pa.string())).to_pylist() == ["a\ufffdb", "fine"]
    nested_field = pa.field("x", pa.list_(pa.struct([("t", pa.string())])))
    assert from_json([[{"t": "\udc00"}]], nested_field).to_pylist() == [[{"t": "\ufffd"}]]


def test_a_stop_token_becomes_its_digits_beside_stop_strings() -> None:
    assert from_json(["###", 2, None], pa.field("stop_reason", pa.string())).to_pylist() == ["###", "2", None]


def test_a_value_of_another_type_is_an_output_error_that_names_the_column() -> None:
    for value, kind in [("x", pa.int64()), ("yesterday", pa.date32()), (1, pa.list_(pa.int64())), (300, pa.int8())]:
        with pytest.raises(OutputError, match="column age"):
            from_json([value], pa.field("age", kind))


def test_non_finite_floats_can_be_replaced() -> None:
    kind = pa.struct([("x", pa.list_(pa.float64())), ("name", pa.string())])
    convert = replace_non_finite(kind, lambda _name: None)
    assert convert is not None
    (value,) = to_json(pa.array([{"x": [1.5, math.nan, math.inf], "name": "NaN"}], kind))
    assert convert(value) == {"x": [1.5, None, None], "name": "NaN"}
    numbers = replace_non_finite(kind, float)
    assert numbers is not None
    assert math.isnan(numbers(value)["x"][1])
    assert numbers(value)["x"][2] == math.inf
    assert replace_non_finite(pa.list_(pa.string()), float) is None
