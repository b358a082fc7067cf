"""The sample is as large as one trial's time allows, grows by chunks, and comes back from the journal as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.request import Prompt
from cbatch.errors import InputError, RowError
from cbatch.tune.calibrate import FIRST_CHUNK, LEAST_LENGTH, Sample, calibrate, recall
from tests.tune.stub_engines import STEP_S, StubEngines, TunePlan, step_cost

LENGTH = 20
SAMPLING = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
PROMPTS = [Prompt(i, [1, 50 + i, 60], SAMPLING) for i in (7, 3, 12, 1, *range(20, 120))]


def source(max_requests: int = 1000) -> StubEngines:
    return StubEngines(EngineConfig(model="stub"), default=TunePlan(max_requests_per_batch=max_requests))


def sample_of(trial_s: float, max_requests: int = 1000, **options: Any) -> Sample:
    given: dict[str, Any] = {"prompts": PROMPTS, "errors": [], "whole": False} | options
    return calibrate(source(max_requests), given["prompts"], given["errors"], trial_s, whole=given["whole"])


def test_where_a_larger_batch_takes_no_longer_all_rows_are_taken() -> None:
    """A step of the stub takes the same time however many requests are in it."""
    one_chunk = LENGTH * STEP_S * step_cost(TunePlan())
    assert len(sample_of(2.5 * one_chunk).prompts) == len(PROMPTS)


def test_where_rows_run_one_by_one_the_sample_is_what_the_time_takes() -> None:
    one_row = LENGTH * STEP_S * step_cost(TunePlan(max_requests_per_batch=1))
    samples = [sample_of(rows * one_row, max_requests=1) for rows in (17, 60, 1000)]
    assert [len(sample.prompts) for sample in samples] == [FIRST_CHUNK, 3 * FIRST_CHUNK, len(PROMPTS)]
    assert not any(sample.num_cut for sample in samples)


def test_outputs_are_cut_where_the_first_rows_alone_take_too_long() -> None:
    """A batch of sixteen stays one, whatever the time: its rows end earlier."""
    long = [
        replace(prompt, sampling=replace(SAMPLING, max_tokens=400 - 399 * (i == 0))) for i, prompt in enumerate(PROMPTS)
    ]
    step_s = STEP_S * step_cost(TunePlan())
    sample = sample_of(49.5 * step_s, prompts=long)
    assert len(sample.prompts) == FIRST_CHUNK
    assert sample.num_cut == FIRST_CHUNK - 1
    assert [prompt.sampling.max_tokens for prompt in sample.prompts] == [1, *[50] * (FIRST_CHUNK - 1)]
    least = sample_of(0.0, prompts=long)
    assert {prompt.sampling.max_tokens for prompt in least.prompts} == {1, LEAST_LENGTH}


def test_a_later_chunk_that_takes_too_long_after_all_is_left_out() -> None:
    lengths = [10] * FIRST_CHUNK + [10_000] * 32
    uneven = [Prompt(i, [1, 50 + i], replace(SAMPLING, max_tokens=length)) for i, length in enumerate(lengths)]
    sample = sample_of(100 * STEP_S * step_cost(TunePlan()), prompts=uneven)
    assert (len(sample.prompts), sample.num_cut) == (FIRST_CHUNK, 0)


def test_a_growing_sample_keeps_what_it_had() -> None:
    one_row = LENGTH * STEP_S * step_cost(TunePlan(max_requests_per_batch=1))
    small, large = (sample_of(rows * one_row, max_requests=1) for rows in (17, 60))
    assert large.prompts[: len(small.prompts)] == small.prompts
    assert [prompt.request_id for prompt in large.of(0)] == sorted(prompt.request_id for prompt in large.of(0))
    assert set(large.rows) == {prompt.request_id for prompt in large.of(len(large.rungs) - 1)}


def test_lengths_are_those_of_the_rows() -> None:
    sample = sample_of(1e6)
    assert sample.output_tokens == LENGTH * len(PROMPTS)
    assert sample.prompt_tokens == 3 * len(PROMPTS)
    assert not sample.counts_prompts


def test_it_comes_back_as_it_was() -> None:
    prompts = [*PROMPTS, Prompt(500, [1, 9], SamplingParams(stop=("x",), temperature=0.5))]
    sample = sample_of(1e6, prompts=prompts, errors=[RowError("no_prompt", "in:5: no prompt")])
    again = recall(json.loads(json.dumps(sample.record())), list(reversed(prompts)), whole=False)
    assert again == sample
    assert (again.num_failed, again.first_error) == (1, "in:5: no prompt")


def test_requests_are_counted_with_their_samples() -> None:
    prompts = [Prompt(i, [1, 2], SamplingParams(max_tokens=4, ignore_eos=True, n=3)) for i in range(4)]
    sample = sample_of(1e6, prompts=prompts)
    assert sample.num_requests == 12
    assert sample.output_tokens == 4 * 3 * 4


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rows_that_run_are_an_error(count: int) -> None:
    tokenizer = source().tokenizer
    never = [Prompt(i, tokenizer.encode("never fits")[1:], SAMPLING) for i in range(3)]
    with pytest.raises(InputError, match="no row of the input can run; the first: the cache" if not count else "one"):
        sample_of(1e6, prompts=never + PROMPTS[:count])
