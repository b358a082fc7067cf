"""Spec I3: which values a parameter takes, what overrides what, and that nothing meant is ignored."""

from __future__ import annotations

import math

import pytest

from cbatch.config import SamplingParams
from cbatch.errors import RowError, UsageError
from cbatch.jobs.params import ParamReader, check_model_defaults, resolve


def read(**columns: object) -> dict[str, object]:
    return ParamReader({}).read(columns)


def refused(column: str, value: object) -> RowError:
    with pytest.raises(RowError) as caught:
        read(**{column: value})
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("max_tokens", 0, 0),
        ("max_tokens", 1, 1),
        ("max_tokens", 128.0, 128),
        ("temperature", 0, 0.0),
        ("temperature", 0.7, 0.7),
        ("temperature", 2, 2.0),
        ("top_p", 1, 1.0),
        ("top_p", 1e-6, 1e-6),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("stop", "\n", ("\n",)),
        ("stop", ["b", "a", "b"], ("b", "a")),
        ("stop", [], ()),
        ("ignore_eos", True, True),
        ("min_tokens", 0, 0),
        ("min_tokens", 3.0, 3),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("repetition_penalty", 1.05, 1.05),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("logit_bias", {}, ()),
        ("logit_bias", {"50256": -100, "7": 0.5, "8": None}, ((7, 0.5), (50256, -100.0))),
        ("logit_bias", '{"7": 1}', ((7, 1.0),)),
        ("include_stop_str_in_output", True, True),
        ("stop_token_ids", 5, (5,)),
        ("stop_token_ids", [7, 5.0, 7], (7, 5)),
        ("stop_token_ids", [], ()),
        ("n", 1, 1),
        ("n", 1024, 1024),
        ("logprobs", 0, 0),
        ("logprobs", 1, 1),
        ("logprobs", 5.0, 5),
        ("logprobs", True, 0),
        ("logprobs", False, None),
        ("prompt_logprobs", 1000, 1000),
        ("json_schema", {"type": "object", "a": "\u00e9"}, '{"type": "object", "a": "\\u00e9"}'),
        ("json_schema", '{"b": 1, "a": 2}', '{"b": 1, "a": 2}'),
        ("json_object", True, True),
        ("regex", "[0-9]+", "[0-9]+"),
        ("choice", ["yes", "no", "yes"], ("yes", "no")),
    ],
)
def test_right_values_are_taken_as_they_are_meant(name: str, value: object, parsed: object) -> None:
    given = read(**{name: value})
    assert given == {name: parsed}
    assert type(given[name]) is type(parsed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", math.nan),
        ("max_tokens", 10**30),
        ("max_tokens", [5]),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", "0.7"),
        ("temperature", False),
        ("temperature", 101),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", {}),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", -1),
        ("seed", 1e17),
        ("seed", "42"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", 0),
        ("stop", {"a": 1}),
        ("stop", "\udc00"),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("min_tokens", -1),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("logit_bias", {"7": 101}),
        ("logit_bias", {"-7": 1}),
        ("logit_bias", {"seven": 1}),
        ("logit_bias", {"7": True}),
        ("logit_bias", "{"),
        ("logit_bias", [7]),
        ("logit_bias", '{"7":' * 5000 + "1" + "}" * 5000),
        ("include_stop_str_in_output", 1),
        ("stop_token_ids", -1),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", True),
        ("stop_token_ids", "5"),
        ("n", 0),
        ("n", 1025),
        ("n", True),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("logprobs", "yes"),
        ("prompt_logprobs", 1.5),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", {"name": "answer", "strict": True, "schema": {"type": "object"}}),
        ("json_schema", '{"not":' * 5000 + "{}" + "}" * 5000),
        ("json_schema", True),
        ("json_object", "yes"),
        ("regex", ""),
        ("regex", 5),
        ("choice", "yes"),
        ("choice", []),
        ("choice", ["yes", ""]),
        ("choice", [1]),
    ],
)
def test_a_wrong_value_is_an_error_that_names_field_and_range(name: str, value: object) -> None:
    error = refused(name, value)
    assert error.code == "bad_parameter"
    assert error.message.startswith(f"{name} must be ")
    assert error.message.isascii()
    assert "it is" in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "stop", "n", "json_schema", "temprature"])
def test_null_is_not_given(name: str) -> None:
    assert read(**{name: None}) == {}


@pytest.mark.parametrize(
    ("column", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("temperatur", "temperature"),
        ("max_token", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_toekns", "max_tokens"),
        ("Max Tokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("topp", "top_p"),
        ("top-k", "top_k"),
        ("TopK", "top_k"),
        ("Seed", "seed"),
        ("STOP", "stop"),
        ("stop_sequences", "stop"),
        ("ignore-eos", "ignore_eos"),
        ("ignore_oes", "ignore_eos"),
        ("repitition_penalty", "repetition_penalty"),
        ("frequency_penality", "frequency_penalty"),
        ("stop_token_id", "stop_token_ids"),
        ("guided_json", "json_schema"),
    ],
)
def test_a_column_that_is_nearly_a_parameter_is_an_error(column: str, meant: str) -> None:
    error = refused(column, 1)
    assert error.code == "unknown_parameter"
    assert f"'{column}'" in error.message
    assert f" {meant}:" in error.message
    assert "--no-row-params" in error.message


ORDINARY = """
text topic top top_1 tops stops step shop seeds seen speed need id N nn m no choices choose voice regexp tokens n_tokens
num_tokens mean_tokens in_tokens template temp temporal tempo schema json object label category bias penalty probs eos
max min map max_score min_score completion row error prompt_tokens completion_tokens cached_tokens stop_reason
finish_reason 温度 k p prompt messages prompt_token_ids custom_id chat_template_kwargs tools
"""


@pytest.mark.parametrize("column", ["", *ORDINARY.split()])
def test_ordinary_columns_pass(column: str) -> None:
    assert read(**{column: "x"}) == {}


def test_a_row_can_leave_out_what_the_command_line_asks_for() -> None:
    assert resolve(ParamReader({"logprobs": 3}).read({"logprobs": False}), {}, seed=0).logprobs is None


def test_a_rows_structure_takes_the_place_of_the_command_lines() -> None:
    reader = ParamReader({"json_object": True, "max_tokens": 3})
    assert reader.read({"regex": "a+"}) == {"max_tokens": 3, "regex": "a+"}
    assert reader.read({"json_object": False}) == {"max_tokens": 3, "json_object": False}
    with pytest.raises(RowError, match="json_schema and choice cannot both"):
        reader.read({"choice": ["a"], "json_schema": {}})
    with pytest.raises(RowError, match="regex and ignore_eos exclude each other"):
        reader.read({"regex": "a+", "ignore_eos": True})
    with pytest.raises(UsageError, match="json_object and regex cannot both"):
        ParamReader({"json_object": True, "regex": "a"})


def test_a_row_may_not_want_more_tokens_than_it_may_have() -> None:
    reader = ParamReader({"max_tokens": 5})
    with pytest.raises(RowError, match="min_tokens is 6, and max_tokens only 5"):
        reader.read({"min_tokens": 6})
    assert reader.read({"min_tokens": 6, "max_tokens": 6}) == {"max_tokens": 6, "min_tokens": 6}
    with pytest.raises(UsageError, match="min_tokens is 9"):
        ParamReader({"max_tokens": 5, "min_tokens": 9})


def test_the_row_overrides_the_command_line_which_overrides_the_model() -> None:
    reader = ParamReader({"temperature": 0.5, "top_p": 0.9})
    model = check_model_defaults({"temperature": 0.1, "top_p": 0.2, "top_k": 7, "bos_token_id": 3, "seed": None})
    given = reader.read({"temperature": 1.0, "prompt": "x"})
    assert resolve(given, model, seed=3) == SamplingParams(temperature=1.0, top_p=0.9, top_k=7, seed=3)
    assert resolve(reader.read({"temperature": None}), {}, seed=0).temperature == 0.5


def test_built_in_is_greedy_with_the_default_length() -> None:
    assert resolve(read(), {}, seed=0) == SamplingParams(max_tokens=None, temperature=0.0)


def test_a_given_seed_is_kept() -> None:
    assert resolve(read(seed=42), {}, seed=3).seed == 42


def test_without_row_params_every_column_is_plain_data() -> None:
    reader = ParamReader({"max_tokens": 5}, row_params=False)
    assert reader.read({"temperature": "hot", "temprature": 1, "n": 0, "max_tokens": "many"}) == {"max_tokens": 5}


def test_a_wrong_value_on_the_command_line_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"top_p must be a number above 0 and at most 1: it is 2"):
        ParamReader({"top_p": 2})


def test_a_model_default_that_cannot_work_names_the_way_out() -> None:
    with pytest.raises(UsageError, match="--generation-config none"):
        check_model_defaults({"temperature": -1.0})


def test_parameters_come_in_one_order_whatever_the_columns_order() -> None:
    assert list(read(stop="a", max_tokens=1)) == list(read(max_tokens=1, stop="a"))


@pytest.mark.parametrize(
    ("name", "text", "parsed"),
    [
        ("max_tokens", "128", 128),
        ("max_tokens", "128.0", 128),
        ("temperature", "0.7", 0.7),
        ("ignore_eos", "True", True),
        ("ignore_eos", "false", False),
        ("stop", "5", ("5",)),
        ("stop", "END", ("END",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "[", ("[",)),
    ],
)
def test_fields_of_csv_are_read_as_what_they_say(name: str, text: str, parsed: object) -> None:
    reader = ParamReader({}, text_values=True)
    assert reader.read({"prompt": "5", name: text}) == {name: parsed}
    assert reader.read({"prompt": "5", name: ""}) == {}
    assert reader.read({"prompt": "[" * 5000, name: text}) == {name: parsed}


@pytest.mark.parametrize(("name", "text"), [("max_tokens", "many"), ("temperature", "NaN"), ("ignore_eos", "1")])
def test_a_field_of_csv_that_says_nothing_right_is_an_error(name: str, text: str) -> None:
    with pytest.raises(RowError, match=f"{name} must be"):
        ParamReader({}, text_values=True).read({name: text})
    with pytest.raises(RowError, match="looks like the parameter temperature"):
        ParamReader({}, text_values=True).read({"Temperature": "1"})
