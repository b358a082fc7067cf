"""Our output columns: which there are, what they are called beside the input's (spec I4)."""

import pytest

from cbatch.io.columns import RESULT_COLUMNS, merge_record, output_names, result_columns

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


def test_token_ids_are_there_where_asked_for() -> None:
    assert [column.name for column in result_columns(token_ids=True)] == SPEC
    assert [column.name for column in result_columns(token_ids=False)] == [
        n for n in SPEC if n != "completion_token_ids"
    ]


def test_a_colliding_input_column_keeps_its_name() -> None:
    names = output_names(["row", "prompt", "error"], token_ids=False)
    assert {ours: name for ours, name in names.items() if ours != name} == {
        "row": "cbatch_row",
        "error": "cbatch_error",
    }


def test_an_output_can_be_the_input_of_the_next_job_and_again() -> None:
    first = list(output_names([], token_ids=True).values())
    second = list(output_names(first, token_ids=True).values())
    third = list(output_names(first + second, token_ids=True).values())
    assert len({*first, *second, *third}) == 3 * len(SPEC)
    assert third[0] == "cbatch_cbatch_row"


def test_a_record_is_the_inputs_columns_then_all_of_ours() -> None:
    names = output_names(["z", "row"], token_ids=False)
    record = merge_record({"z": 1, "row": "mine"}, {"row": 7, "completion": "text"}, names)
    assert list(record)[:4] == ["z", "row", "cbatch_row", "completion"]
    assert (record["row"], record["cbatch_row"], record["completion"]) == ("mine", 7, "text")
    assert record["error"] is None  # ours are always there
    assert len(record) == 2 + len(SPEC) - 1


def test_an_undeclared_column_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="rows"):
        merge_record({}, {"rows": 1}, output_names([], token_ids=False))
