"""The output's own columns, declared once: the sinks' schema, the docs and the records of a job all come from here.

Called by jobs for names and merging. Types are spelled, not built, so that pyarrow is imported only where a schema is
needed (`cbatch.io.schema`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "cbatch_"  # put before a column of ours where the input has one of that name


@dataclass(frozen=True, slots=True)
class Column:
    """One column of ours: its name, its Arrow type as spelled in `cbatch.io.schema`, and what it holds."""

    name: str
    type: str
    description: str


TOP_LOGPROBS = "list<list<struct<token: string, token_id: int64, logprob: double>>>"
RESULT_COLUMNS = (
    Column("row", "int64", "input row, counted from 0 over the whole input"),
    Column("completion", "string", "generated text, of the first sample where n > 1; null where the row failed"),
    Column("completions", "list<string>", "all samples where n > 1, else null"),
    Column("finish_reason", "string", "stop, length or error; where n > 1, length if any sample was cut"),
    Column(
        "stop_reason",
        "string",
        "the stop string or the stop token that ended it, null for EOS and length; "
        "a token is a number in JSONL and its decimal digits in Parquet",
    ),
    Column("error", "struct<code: string, message: string>", "why the row failed; null where it did not"),
    Column("prompt_tokens", "int64", "tokens of the prompt"),
    Column("cached_tokens", "int64", "prompt tokens reused from the cache, not computed"),
    Column("recomputed_tokens", "int64", "tokens computed again after a soft reset"),
    Column("completion_tokens", "int64", "generated tokens of all samples, an ending EOS or stop token included"),
    Column("completion_token_ids", "list<int64>", "token ids of completion; only with --return-token-ids"),
    Column("token_logprobs", "list<double>", "log-probability of each token of completion"),
    Column("top_logprobs", TOP_LOGPROBS, "the likeliest tokens in the place of each of them, best first"),
    Column("prompt_token_logprobs", "list<double>", "log-probability of each prompt token, null for the first"),
    Column("prompt_top_logprobs", TOP_LOGPROBS, "the likeliest tokens in the place of each prompt token"),
    Column("scheduled_at", "timestamp[us, UTC]", "when the request was first scheduled (UTC)"),
    Column("queue_s", "double", "seconds, handed to the engine → first scheduled"),
    Column("prefill_s", "double", "seconds, first scheduled → first token"),
    Column("ttft_s", "double", "seconds to the first token: queue_s + prefill_s"),
    Column("itl_mean_s", "double", "mean seconds between tokens; null with fewer than two"),
    Column("itl_p99_s", "double", "99th percentile of the seconds between tokens"),
    Column("e2e_s", "double", "seconds, handed to the engine → finished"),
    Column("preemptions", "int64", "times the request was moved out or reset"),
    Column("attempt", "int64", "how often the row was run, from 1"),
)

# Columns that an output has only where they are asked for, and the words that ask.
OPTIONAL_COLUMNS = {
    "completion_token_ids": "return_token_ids",
    "token_logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_token_logprobs": "prompt_logprobs",
    "prompt_top_logprobs": "prompt_logprobs",
}
ROW_WORDS = frozenset({"logprobs", "prompt_logprobs"})  # those of them that a row may say of itself


def words_of_row(columns: Mapping[str, Any]) -> set[str]:
    """Return which of `ROW_WORDS` a row asks for."""
    return {word for word in ROW_WORDS if not (columns.get(word) in (None, "") or columns[word] is False)}


def result_columns(asked: Collection[str]) -> tuple[Column, ...]:
    """Return our columns of a job that `asked` for these words, in the order of the output."""
    return tuple(
        column
        for column in RESULT_COLUMNS
        if column.name not in OPTIONAL_COLUMNS or OPTIONAL_COLUMNS[column.name] in asked
    )


def output_names(input_names: Iterable[str], asked: Collection[str]) -> dict[str, str]:
    """Map each column of ours to its name in the output; the renamed ones are those where key and value differ.

    An input column keeps its name and ours gets `cbatch_` before it, as often as it takes to be free, so that
    a job's output can be the next job's input.
    """
    taken = set(input_names)
    names = {}
    for column in result_columns(asked):
        name = column.name
        while name in taken:
            name = PREFIX + name
        taken.add(name)
        names[column.name] = name
    return names


def merge_record(columns: dict[str, Any], result: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Build a row's output record: the input's columns in their order, then every column of ours, null where unset."""
    assert result.keys() <= names.keys(), f"undeclared result columns {sorted(result.keys() - names.keys())}"
    return columns | {name: result.get(ours) for ours, name in names.items()}
