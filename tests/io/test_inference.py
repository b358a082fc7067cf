"""Arrow types of JSON columns: found over all rows, never locked by the first ones (spec I4)."""

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.io.arrowform import JSON_TEXT, from_json
from cbatch.io.inference import TypeInference
from cbatch.io.jsonform import dump, load

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def infer(*column: Any) -> pa.Field:
    inference = TypeInference()
    for value in column:
        inference.observe({"x": value})
    return inference.schema().field("x")


def is_json_text(field: pa.Field) -> bool:
    return field.type == pa.string() and field.metadata == JSON_TEXT


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([None], pa.string()),
        ([None, True], pa.bool_()),
        ([1, None, 2**63 - 1], pa.int64()),
        ([1, 0.5], pa.float64()),
        ([0.5, 2**53], pa.float64()),
        (["a", None], pa.string()),
        ([[], None], pa.list_(pa.string())),
        ([[], [1, None], [0.5]], pa.list_(pa.float64())),
        ([[[1]], [[]]], pa.list_(pa.list_(pa.int64()))),
        ([{"a": 1}, {"b": [True]}], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.bool_()))])),
        ([b"\x00", None], pa.string()),
    ],
)
def test_one_kind_has_its_type(column: list[Any], kind: pa.DataType) -> None:
    assert infer(*column).type == kind
    assert not infer(*column).metadata


@pytest.mark.parametrize(
    "column",
    [
        [1, "a"],
        [{}, [], 3],
        [{}],
        [[{}]],
        [True, 1],
        [98765432109876543210],
        [[-(2**63) - 1]],
        [2**53 + 1, 0.5],  # one of them would not be exact
        [0.5, 2**53 + 1],
        [["text"], [[{"type": "text"}]]],
        [{"content": "text"}, {"content": ["part"]}],
        [{"a\ud83d": 1}],
        [{str(i): 1} for i in range(1000)],  # a map: each row has keys of its own
        [{str(i): {str(j): 1 for j in range(100)} for i in range(100)}],
        [load("[" * 100 + "]" * 100)],
    ],
    ids=lambda column: str(column)[:30],
)
def test_mixed_columns_are_json_text(column: list[Any]) -> None:
    field = infer(*column)
    assert is_json_text(field)
    assert [load(text) for text in from_json(column, field).to_pylist()] == column


def test_nulls_in_thousands_of_rows_lock_nothing() -> None:
    assert infer(*[None] * 5000, "text").type == pa.string()
    assert infer(*[None] * 5000, [1]).type == pa.list_(pa.int64())
    assert infer(*[[]] * 5000, [{"a": 0.5}]).type == pa.list_(pa.struct([("a", pa.float64())]))


def test_columns_come_in_the_order_of_their_first_row() -> None:
    inference = TypeInference()
    inference.observe({"b": 1})
    inference.observe({"c": 1, "b": 2, "a": 3})
    assert inference.schema().names == ["b", "c", "a"]
    assert TypeInference().schema().names == []


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=5))
def test_every_column_can_be_written_with_its_type(column: list[Any]) -> None:
    field = infer(*column)
    array = from_json(column, field)
    if is_json_text(field):
        assert [None if text is None else load(text) for text in array.to_pylist()] == column
    elif not pa.types.is_nested(field.type):
        assert array.to_pylist() == column  # nested values gain nulls for keys that they lack


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=5))
def test_the_type_does_not_depend_on_a_journal_in_between(column: list[Any]) -> None:
    assert infer(*column).equals(infer(*(load(dump(value)) for value in column)), check_metadata=True)


def test_memory_does_not_grow_with_the_rows() -> None:
    def size(rows: int) -> int:
        inference = TypeInference()
        for row in range(rows):
            inference.observe({"text": f"row {row}", "map": {f"key {row}": row}, "ids": [row]})
        return len(pickle.dumps(inference))

    assert size(4000) == size(1000)


def test_names_that_differ_by_half_characters_alone_are_one_column() -> None:
    inference = TypeInference()
    inference.observe({chr(0xD800): 1, chr(0xDC00): "x", "a": 2})
    assert inference.schema().names == ["\ufffd", "a"]
    assert inference.schema().field("\ufffd").metadata == JSON_TEXT
