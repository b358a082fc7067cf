"""A trial's clock runs over the sample alone, in an engine of its own; whatever goes wrong is its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.errors import EngineError, UsageError
from cbatch.tune.measure import WARM_UP_PROMPTS, build_default, fix_length, output_length, run_chunk, run_trial
from tests.stub_engine import DEFAULT_LENGTH
from tests.tune.stub_engines import BEST, BUILD_S, STEP_S, StubEngines, TunePlan, step_cost

FIXED = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [Prompt(i, [1, *range(10 + i, 40 + i)], FIXED) for i in range(8)]


def engines(**options: Any) -> StubEngines:
    return StubEngines(EngineConfig(model="stub"), **options)


def test_the_clock_runs_from_the_first_step_to_the_last() -> None:
    source = engines()
    outcome = run_trial(source, BEST, PROMPTS)
    assert outcome.ok
    assert outcome.timed_s == pytest.approx(12 * STEP_S)
    assert outcome.output_tokens == 8 * 12
    assert outcome.prompt_tokens == 8 * 31
    assert outcome.tokens_per_s == pytest.approx(8 * 12 / (12 * STEP_S))
    assert outcome.processed_per_s == pytest.approx(8 * 43 / (12 * STEP_S))
    assert outcome.memory_bytes == 1 << 30
    assert outcome.wall_s == pytest.approx(source.now)
    assert outcome.wall_s > BUILD_S + outcome.timed_s
    assert source.engines[0].inner.prepared == [FIXED] * 8


def test_a_slow_first_step_counts_for_nobody() -> None:
    """Compiling, allocating, first touches: vllm-project/vllm#34776."""
    plain, slow = run_trial(engines(), {}, PROMPTS), run_trial(engines(first_step_s=3.0), {}, PROMPTS)
    assert slow.timed_s == pytest.approx(plain.timed_s)
    assert slow.wall_s == pytest.approx(plain.wall_s + 3.0)


def test_every_trial_has_a_cold_cache_and_a_warm_up_of_other_prompts() -> None:
    source = engines()
    for _ in range(2):
        run_trial(source, {}, PROMPTS)
    first, second = source.engines
    assert first.inner is not second.inner
    for engine in source.engines:
        warm_up, timed = engine.prompts[:-8], engine.prompts[-8:]
        assert timed == PROMPTS
        assert 0 < len(warm_up) <= WARM_UP_PROMPTS
        assert all(prompt.request_id < 0 for prompt in warm_up)
        starts = {tuple(prompt.token_ids[:2]) for prompt in timed}
        assert starts.isdisjoint(tuple(prompt.token_ids[:2]) for prompt in warm_up)


def test_the_warm_up_asks_for_no_more_room_than_the_sample() -> None:
    short = [Prompt(i, [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(3)]
    source = engines()
    run_trial(source, {}, short)
    for prompt in source.engines[0].prompts[:-3]:
        assert len(prompt.token_ids) + (prompt.sampling.max_tokens or 0) <= 9


def raising(error: Exception) -> Any:
    def build(_settings: Mapping[str, object]) -> None:
        raise error

    return build


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "memory ran out"),
        (EngineError("the device was lost", hint="look at it"), "the device was lost"),
        (UsageError("does not fit"), "does not fit"),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
    ],
)
def test_a_failure_is_an_outcome(error: Exception, reason: str) -> None:
    outcome = run_trial(engines(on_build=raising(error)), {}, PROMPTS)
    assert not outcome.ok
    assert outcome.reason == reason


def test_a_failure_in_the_middle_is_one_too() -> None:
    source = engines(engine_options={"fail_at_step": 9})
    outcome = run_trial(source, {}, PROMPTS)
    assert outcome.reason == "the device was lost"
    assert outcome.wall_s > BUILD_S


def test_a_step_that_ran_out_of_memory_is_a_failure_even_where_smaller_ones_went_on() -> None:
    source = engines()
    source.engine_options = {"stats": (stats := _stats_of_out_of_memory())}
    outcome = run_trial(source, {}, PROMPTS)
    assert stats.steps > 0
    assert outcome.reason == "memory ran out"


def _stats_of_out_of_memory() -> Any:
    from cbatch.engine.stats import EngineStats

    return EngineStats(out_of_memory_steps=1)


def test_a_row_that_fails_is_no_speed() -> None:
    tokenizer = engines().tokenizer
    prompts = [*PROMPTS, Prompt(99, tokenizer.encode("never fits"), FIXED)]
    prompts = [Prompt(p.request_id, p.token_ids[1:], p.sampling) for p in prompts]
    outcome = run_trial(engines(), {}, prompts)
    assert outcome.reason == "row 99 failed: the cache cannot hold this request"


def test_a_chunk_runs_as_the_job_would_run_it() -> None:
    """Some rows end by themselves, some at max_tokens."""
    source = engines()
    engine = build_default(source)
    chunk = [
        Prompt(0, [1, 50], SamplingParams()),
        Prompt(1, [1, 51], SamplingParams(max_tokens=3)),
        Prompt(2, [1, 52], SamplingParams(max_tokens=30, ignore_eos=True)),
    ]
    ran = run_chunk(source, engine, chunk, 1e6)
    assert {row: output_length(output) for row, output in ran.outputs.items()} == {0: DEFAULT_LENGTH, 1: 3, 2: 30}
    assert ran.seconds == pytest.approx(30 * STEP_S * step_cost(TunePlan()))
    assert ran.tokens_left == 0
    again = run_chunk(source, engine, chunk[:1], 1e6)  # on the same engine
    assert (len(again.outputs), again.tokens_left) == (1, 0)


def test_a_chunk_stops_when_its_time_is_over() -> None:
    source = engines()
    step_s = STEP_S * step_cost(TunePlan())
    chunk = [Prompt(i, [1, 50 + i], SamplingParams(max_tokens=5 + 95 * (i > 0), ignore_eos=True)) for i in range(3)]
    ran = run_chunk(source, build_default(source), chunk, 9.5 * step_s)
    assert list(ran.outputs) == [0]
    assert ran.tokens_left == 2 * 10
    assert ran.seconds == pytest.approx(10 * step_s)


def test_default_settings_that_do_not_work_end_the_search() -> None:
    chunk = [Prompt(0, [1, 50], SamplingParams())]
    with pytest.raises(EngineError, match="the default settings do not work: memory ran out"):
        build_default(engines(on_build=raising(MemoryError())))
    source = engines(engine_options={"fail_at_step": 2})
    with pytest.raises(EngineError, match="the device was lost"):
        run_chunk(source, build_default(source), chunk, 1e6)


def test_a_fixed_length_is_kept_whatever_the_tokens() -> None:
    asked = SamplingParams(max_tokens=500, min_tokens=4, stop=("x",), stop_token_ids=(7,), temperature=0.7, seed=5)
    output = RequestOutput(1, 2, [9] * 21, "stop")
    fixed = fix_length(Prompt(1, [1, 2], asked), output_length(output)).sampling
    assert (fixed.max_tokens, fixed.min_tokens, fixed.stop, fixed.stop_token_ids) == (21, 0, (), ())
    assert fixed.ignore_eos
    assert (fixed.temperature, fixed.seed) == (0.7, 5)


def test_samples_of_a_row_get_their_mean_length() -> None:
    samples = tuple(RequestOutput(1, 2, [9] * count, "stop") for count in (10, 21))
    output = RequestOutput(1, 2, [9] * 10, "stop", samples=samples)
    fixed = fix_length(Prompt(1, [1], SamplingParams(n=2)), output_length(output)).sampling
    assert (fixed.n, fixed.max_tokens) == (2, 16)


def test_structured_output_ends_where_it_is_whole() -> None:
    fixed = fix_length(Prompt(1, [1], SamplingParams(regex="a+")), 5).sampling
    assert (fixed.max_tokens, fixed.ignore_eos, fixed.regex) == (5, False, "a+")
