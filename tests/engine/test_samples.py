"""n > 1: the prompt computed once, every sample as if it were asked for by itself. On a tiny Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cbatch.config import SamplingParams
from cbatch.engine.request import Prompt, RequestMetrics, RequestOutput
from cbatch.engine.samples import join_samples, sample_seed
from cbatch.errors import RowError
from cbatch.models.load import LoadedModel
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import build_tiny

PAGE = 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = build_tiny("llama", tmp_path_factory.mktemp("llama"))
    return load_tiny(folder)


def params(**given: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 30, "temperature": 1.0, "ignore_eos": True, "seed": 9} | given))  # type: ignore[arg-type]


SETTINGS = {
    "ample": {},
    "chunked": {"max_batch_tokens": 9},
    "one by one": {"max_requests_per_batch": 1},
    "preempted": {"num_blocks": 16, "page_size": 8},
    "offloaded": {"num_blocks": 16, "page_size": 8, "cpu_offload_space": 0.001},
    "unshared": {"allow_block_sharing": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_are_those_of_separate_requests(loaded: LoadedModel, name: str) -> None:
    asked = [
        {"n": 5},
        {"n": 1, "seed": 4},
        {"n": 3, "temperature": 0.0},
        {"n": 2, "repetition_penalty": 1.4, "logprobs": 1},
    ]
    tokens = [make_tokens(41 + i, seed=i) for i in range(len(asked))]
    separate = [
        [
            run(make_engine(loaded), Prompt(0, ids, params(**a | {"n": 1, "seed": sample_seed(a.get("seed", 9), k)})))[
                0
            ]
            for k in range(a["n"])
        ]
        for ids, a in zip(tokens, asked, strict=True)
    ]
    engine = make_engine(loaded, **SETTINGS[name])
    outputs = run(engine, *(Prompt(i, tokens[i], params(**a)) for i, a in enumerate(asked)))
    for output, expected in zip(outputs, separate, strict=True):
        samples = output.samples or (output,)
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
        assert (output.samples == ()) == (len(expected) == 1)
        assert output.token_ids == samples[0].token_ids
        for sample, alone in zip(samples, expected, strict=True):
            assert (sample.logprobs is None) == (alone.logprobs is None)
            if sample.logprobs is not None and alone.logprobs is not None:
                ours, theirs = torch.tensor(sample.logprobs.tokens), torch.tensor(alone.logprobs.tokens)
                torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    assert len({tuple(sample.token_ids) for sample in outputs[0].samples}) == 5
    assert len({tuple(sample.token_ids) for sample in outputs[2].samples}) == 1
    if "num_blocks" in SETTINGS[name]:
        assert engine.stats.preemptions > 0


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(loaded: LoadedModel) -> None:
    engine, length, count = make_engine(loaded), 5 * PAGE + 3, 6
    most_owned = 0
    steps = engine.steps(iter([Prompt(0, make_tokens(length), params(n=count, max_tokens=8))]))
    outputs = []
    for finished in steps:
        outputs += finished
        most_owned = max(most_owned, engine._cache.allocators[0].num_owned_blocks)
    (output,) = outputs
    assert most_owned == 5 + count  # five full blocks for all of them, and each one's own last
    assert output.metrics.computed_tokens == length + (count - 1) * 3 + count * 7
    assert engine.stats.prompt_tokens == output.num_prompt_tokens == length
    assert output.metrics.cached_tokens == engine.stats.cached_tokens == 0
    assert engine.stats.output_tokens == count * 8


def test_samples_end_each_by_its_own_condition(loaded: LoadedModel) -> None:
    tokens = make_tokens(20)
    (free,) = run(make_engine(loaded), Prompt(0, tokens, params(n=4)))
    ending = free.samples[1].token_ids[3]
    (output,) = run(make_engine(loaded), Prompt(0, tokens, params(n=4, stop_token_ids=(ending,))))
    lengths = [s.token_ids.index(ending) + 1 if ending in s.token_ids else len(s.token_ids) for s in free.samples]
    assert [len(sample.token_ids) for sample in output.samples] == lengths
    assert len(set(lengths)) > 1
    assert output.finish_reason == ("length" if max(lengths) == 30 else "stop")


def test_only_prompts_of_which_nothing_ran_are_dropped(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_requests_per_batch=2)
    steps = engine.steps(Prompt(i, make_tokens(5, seed=i), params(n=3, max_tokens=4)) for i in range(4))
    next(steps)
    dropped = engine.drop_waiting()
    finished = [output for step in steps for output in step]
    assert dropped == [1]
    assert sorted(output.request_id for output in finished) == [0, 2, 3]
    assert all(len(output.samples) == 3 for output in finished)


def test_what_an_abandoned_call_left_is_no_part_of_the_next(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_requests_per_batch=1)
    steps = engine.steps(iter([Prompt(0, make_tokens(5), params(n=2, max_tokens=2))]))
    for _ in range(3):
        next(steps)
    steps.close()
    (output,) = run(engine, Prompt(0, make_tokens(5), params(n=2, max_tokens=2)))
    assert len(output.samples) == 2


def test_a_sample_that_fails_fails_the_row() -> None:
    good = RequestOutput(3, 5, [1, 2], "stop", stop_reason="x", metrics=RequestMetrics(e2e_s=1.0))
    bad = RequestOutput(3, 5, [1], "error", error=RowError("non_finite_logits", "no"))
    joined = join_samples([good, bad])
    assert (joined.finish_reason, joined.error, joined.stop_reason) == ("error", bad.error, None)
    assert joined.samples == (good, bad)


def test_the_times_of_a_row_go_from_its_first_sample_to_its_last() -> None:
    def sample(queue_s: float, prefill_s: float, itl_s: float | None, e2e_s: float, count: int) -> RequestOutput:
        metrics = RequestMetrics(100.0 + queue_s, queue_s, prefill_s, itl_s, itl_s, e2e_s, 7, 10, 1, 2)
        return RequestOutput(0, 9, [5] * count, "stop", metrics=metrics)

    joined = join_samples(
        [sample(2.0, 1.0, 0.5, 9.0, 5), sample(1.0, 3.0, 0.2, 11.0, 3), sample(4.0, 1.0, None, 5.0, 1)]
    )
    assert joined.metrics == RequestMetrics(101.0, 1.0, 2.0, pytest.approx(0.4), 0.5, 11.0, 7, 30, 3, 6)


def test_seeds_of_samples_are_stable_and_differ() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(50) for sample in range(20)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, 0) == 7
