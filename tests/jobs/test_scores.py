"""Spec I4: the columns that rows ask for, one schema whoever asks, and every sample of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.jobs.merge import merge_parts
from tests.jobs.jobkit import Bench, prompts

SCORES = ["token_logprobs", "top_logprobs"]
PROMPT_SCORES = ["prompt_token_logprobs", "prompt_top_logprobs"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def columns(bench: Bench) -> list[str]:
    names = {tuple(name for name in row if name in SCORES + PROMPT_SCORES) for row in bench.rows()}
    assert len(names) == 1, "rows have different columns"
    return list(names.pop())


@pytest.mark.parametrize(
    ("row", "options", "there"),
    [
        ({}, {}, []),
        ({"logprobs": 2}, {}, SCORES),
        ({"logprobs": False, "prompt_logprobs": None}, {}, []),
        ({}, {"sampling": {"prompt_logprobs": 0}}, PROMPT_SCORES),
        ({"prompt_logprobs": True}, {"sampling": {"logprobs": 1}}, SCORES + PROMPT_SCORES),
        ({"logprobs": 2}, {"row_params": False}, []),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_are_there_where_any_row_asks(
    bench: Bench, row: dict[str, Any], options: dict[str, Any], there: list[str], suffix: str
) -> None:
    bench.output = bench.path / f"out{suffix}"
    bench.write([*prompts(3), {"prompt": "last", "max_tokens": 3, **row}])
    assert bench.run(output=str(bench.output), **options).exit_code == 0
    assert columns(bench) == there
    first, last = bench.rows()[0], bench.rows()[-1]
    if "logprobs" in row and there:
        assert first["token_logprobs"] is None
        assert last["token_logprobs"] == [-0.5] * 3
        assert [len(top) for top in last["top_logprobs"]] == [2] * 3
        assert set(last["top_logprobs"][0][0]) == {"token", "token_id", "logprob"}
    if row.get("prompt_logprobs"):
        assert last["prompt_token_logprobs"] == [None, *[-0.5] * (last["prompt_tokens"] - 1)]
        assert last["prompt_top_logprobs"] is None


def test_a_resumed_and_a_sharded_job_have_the_same_columns(bench: Bench) -> None:
    bench.write([*prompts(5), {"prompt": "last", "logprobs": 0}])
    bench.run()
    whole = bench.output.read_bytes()
    bench.output.unlink()
    assert bench.run().rows_replayed == 6
    assert bench.output.read_bytes() == whole
    for index in range(3):
        bench.run(output=str(bench.path / "parts.jsonl"), shard=f"{index}/3")
    merge_parts(str(bench.path / "parts.jsonl"))
    bench.output = bench.path / "parts.jsonl"
    assert columns(bench) == SCORES


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_every_sample_is_in_completions_and_the_first_in_completion(bench: Bench, suffix: str) -> None:
    bench.output = bench.path / f"out{suffix}"
    sampled = {"temperature": 1.0, "seed": 3, "logprobs": 0}
    bench.write([{"prompt": "p", "n": 3, **sampled}, {"prompt": "p", **sampled}, {"prompt": "p", "n": 1}])
    bench.run(output=str(bench.output), return_token_ids=True)
    three, one, greedy = bench.rows()
    assert len(set(three["completions"])) == 3
    assert three["completions"][0] == three["completion"] == one["completion"]
    assert one["completions"] is greedy["completions"] is None
    assert (three["completion_tokens"], one["completion_tokens"]) == (24, 8)
    assert three["completion_token_ids"] == one["completion_token_ids"]
    assert three["token_logprobs"] == one["token_logprobs"]
    assert "samples" not in three
    assert bench.report()["output_tokens"] == 40
