"""The JSON form: exact, one line whatever the text, and read back as it was."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.io.jsonform import dump, dump_line, format_utc, load

any_text = st.text(st.characters(exclude_categories=()))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=20,
)


def has_surrogate_pair(value: object) -> bool:
    """Two lone surrogates side by side are, once escaped, one character."""
    return json.loads(json.dumps(value)) != value


@settings(deadline=None)
@given(values)
def test_values_come_back_as_they_were(value: object) -> None:
    text = dump(value)
    text.encode()  # no lone surrogate is left
    if not has_surrogate_pair(value):
        assert load(text) == value
        assert dump(load(text)) == text  # key order, int against float


@settings(deadline=None)
@given(st.dictionaries(any_text, any_text))
def test_a_record_is_one_line_for_every_tool(record: dict[str, str]) -> None:
    line = dump_line(record)
    assert line.count(b"\n") == 1
    assert len(line.decode().splitlines()) == 1


def test_text_is_utf8_and_not_escaped() -> None:
    assert dump_line({"a": "é日😀"}) == '{"a": "é日😀"}\n'.encode()


def test_separators_and_lone_surrogates_are_escaped() -> None:
    assert dump("\u2028\u2029\x85\ud83d") == r'"\u2028\u2029\u0085\ud83d"'


def test_integers_are_exact_at_any_size() -> None:
    assert dump([2**63, -(10**40), 9007199254740993]) == f"[{2**63}, -1{'0' * 40}, 9007199254740993]"


def test_numbers_that_json_lacks_are_null() -> None:
    assert dump({"a": [float("nan"), {"b": float("inf")}], "c": -float("inf"), "d": 0.5}) == (
        '{"a": [null, {"b": null}], "c": null, "d": 0.5}'
    )


def test_bytes_are_base64() -> None:
    assert dump({"a": b"\x00\xff"}) == '{"a": "AP8="}'


def test_utc_seconds_are_iso() -> None:
    assert format_utc(0.25) == "1970-01-01T00:00:00.250000Z"
    assert format_utc(1_767_225_600) == "2026-01-01T00:00:00.000000Z"


@pytest.mark.parametrize("text", ["[" * 129 + "]" * 129, '{"a":' * 129 + "1" + "}" * 129, "", "NaN,", "1" * 5000])
def test_what_cannot_be_loaded_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 every reason has its own message
        load(text)


def test_nesting_up_to_the_limit_is_loaded() -> None:
    value = load("[" * 128 + '"[[[\\"[["' + "]" * 128)
    assert dump(value).count("[") == 133
