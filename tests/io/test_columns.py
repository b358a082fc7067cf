"""Our output columns: which there are, what they are called beside the input's (spec I4)."""

from collections.abc import Collection

import pytest

from cbatch.io.columns import RESULT_COLUMNS, merge_record, output_names, result_columns, words_of_row

SPEC = [
    "row",
    "completion",
    "completions",
    "finish_reason",
    "stop_reason",
    "error",
    "prompt_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "completion_tokens",
    "completion_token_ids",
    "token_logprobs",
    "top_logprobs",
    "prompt_token_logprobs",
    "prompt_top_logprobs",
    "scheduled_at",
    "queue_s",
    "prefill_s",
    "ttft_s",
    "itl_mean_s",
    "itl_p99_s",
    "e2e_s",
    "preemptions",
    "attempt",
]


def test_the_columns_are_the_specs() -> None:
    assert [column.name for column in RESULT_COLUMNS] == SPEC
    assert all(column.description for column in RESULT_COLUMNS)


ALL = {"return_token_ids", "logprobs", "prompt_logprobs"}
OPTIONAL = [name for name in SPEC if name.endswith(("token_ids", "logprobs"))]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ((), []),
        ({"return_token_ids"}, ["completion_token_ids"]),
        ({"logprobs"}, ["token_logprobs", "top_logprobs"]),
        ({"prompt_logprobs"}, ["prompt_token_logprobs", "prompt_top_logprobs"]),
        (ALL, OPTIONAL),
    ],
)
def test_optional_columns_are_there_where_asked_for(asked: Collection[str], names: list[str]) -> None:
    assert [column.name for column in result_columns(asked)] == [
        name for name in SPEC if name not in OPTIONAL or name in names
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, set()),
        ({"logprobs": None, "prompt_logprobs": False}, set()),
        ({"logprobs": 0}, {"logprobs"}),
        ({"logprobs": True, "prompt_logprobs": 5, "top_p": 1}, {"logprobs", "prompt_logprobs"}),
    ],
)
def test_rows_ask_by_what_they_have(columns: dict[str, object], words: set[str]) -> None:
    assert words_of_row(columns) == words


def test_a_colliding_input_column_keeps_its_name() -> None:
    names = output_names(["row", "prompt", "error"], ())
    assert {ours: name for ours, name in names.items() if ours != name} == {
        "row": "cbatch_row",
        "error": "cbatch_error",
    }


def test_an_output_can_be_the_input_of_the_next_job_and_again() -> None:
    first = list(output_names([], ALL).values())
    second = list(output_names(first, ALL).values())
    third = list(output_names(first + second, ALL).values())
    assert len({*first, *second, *third}) == 3 * len(SPEC)
    assert third[0] == "cbatch_cbatch_row"


def test_a_record_is_the_inputs_columns_then_all_of_ours() -> None:
    names = output_names(["z", "row"], ())
    record = merge_record({"z": 1, "row": "mine"}, {"row": 7, "completion": "text"}, names)
    assert list(record)[:4] == ["z", "row", "cbatch_row", "completion"]
    assert (record["row"], record["cbatch_row"], record["completion"]) == ("mine", 7, "text")
    assert record["error"] is None  # ours are always there
    assert len(record) == 2 + len(SPEC) - len(OPTIONAL)


def test_an_undeclared_column_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="rows"):
        merge_record({}, {"rows": 1}, output_names([], ()))
