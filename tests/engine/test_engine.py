"""The engine as its callers see it: limits, endings, laziness, sharing, failures. On a tiny random Llama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import CONTEXT, EOS_ID, build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_tiny(folder)


def greedy(max_tokens: int | None, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | others))  # type: ignore[arg-type]


# Limits


def test_a_default_max_tokens_is_cut_to_what_the_context_leaves(loaded: LoadedModel) -> None:
    (output,) = run(make_engine(loaded), Prompt(0, make_tokens(CONTEXT - 5), greedy(None)))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)


def test_a_default_max_tokens_is_cut_to_what_the_cache_leaves(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_blocks=3, page_size=16)
    (output,) = run(engine, Prompt(0, make_tokens(40), greedy(None)))
    # 48 tokens have KV; the last generated one is never read again.
    assert (output.finish_reason, len(output.token_ids)) == ("length", 9)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "code"),
    [
        (CONTEXT - 4, 5, "context_exceeded"),
        (CONTEXT, 1, "prompt_too_long"),
        (CONTEXT, None, "prompt_too_long"),
        (CONTEXT + 1, 1, "prompt_too_long"),
    ],
)
def test_what_exceeds_the_context_is_that_rows_error(
    loaded: LoadedModel, num_prompt: int, max_tokens: int | None, code: str
) -> None:
    bad, good = run(
        make_engine(loaded),
        Prompt(0, make_tokens(num_prompt), greedy(max_tokens)),
        Prompt(1, make_tokens(4), greedy(3)),
    )
    assert bad.error is not None
    assert (bad.finish_reason, bad.error.code) == ("error", code)
    assert str(CONTEXT) in str(bad.error)
    assert len(good.token_ids) == 3


def test_a_prompt_that_fills_the_context_but_one_gets_one_token(loaded: LoadedModel) -> None:
    (output,) = run(make_engine(loaded), Prompt(0, make_tokens(CONTEXT - 1), greedy(1)))
    assert len(output.token_ids) == 1


def test_what_can_never_fit_the_cache_is_that_rows_error_at_once(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_blocks=4, page_size=16)
    prompts = [
        Prompt(0, make_tokens(66), greedy(None)),
        Prompt(1, make_tokens(30), greedy(100)),
        Prompt(2, make_tokens(60), greedy(5)),  # 64 tokens of KV: just fits
        Prompt(3, make_tokens(9), greedy(4)),
    ]
    outputs = run(engine, *prompts)
    assert [output.finish_reason for output in outputs] == ["error", "error", "length", "length"]
    assert {output.error.code for output in outputs if output.error} == {"cache_exceeded"}
    assert outputs[0].metrics.scheduled_at is None


def test_a_pool_too_small_for_all_gives_the_tokens_of_an_ample_one(loaded: LoadedModel) -> None:
    prompts = [Prompt(i, make_tokens(20 + i, seed=i), greedy(60)) for i in range(6)]
    ample = run(make_engine(loaded), *prompts)
    tight_engine = make_engine(loaded, num_blocks=12, page_size=8)
    tight = run(tight_engine, *prompts)
    assert [o.token_ids for o in tight] == [o.token_ids for o in ample]
    assert tight_engine.stats.soft_resets > 0
    assert sum(o.metrics.preemptions for o in tight) == tight_engine.stats.preemptions
    assert sum(o.metrics.recomputed_tokens for o in tight) == tight_engine.stats.recomputed_tokens > 0


# Endings


def test_eos_ends_a_request_and_counts_as_a_token(loaded: LoadedModel) -> None:
    tokens = make_tokens(10)
    (free,) = run(make_engine(loaded), Prompt(0, tokens, greedy(30)))
    ending = free.token_ids[5]
    engine = make_engine(loaded)
    engine._intake.eos_token_ids = frozenset({EOS_ID, ending})
    stopped, ignored = run(engine, Prompt(0, tokens, SamplingParams(max_tokens=30)), Prompt(1, tokens, greedy(30)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(ending) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    assert (ignored.finish_reason, ignored.token_ids) == ("length", free.token_ids)


def test_a_stop_string_ends_a_request_and_its_text(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    tokens = make_tokens(12, seed=3)
    (free,) = run(engine, Prompt(0, tokens, greedy(40)))
    text = engine.tokenizer.decode(free.token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (output,) = run(make_engine(loaded), Prompt(0, tokens, greedy(40, stop=(stop, "never said"))))
    decoded = engine.tokenizer.decode(output.token_ids)[: output.text_length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert decoded == text[: text.index(stop)]
    assert len(output.token_ids) < len(free.token_ids)


def test_a_stop_string_that_never_comes_changes_nothing(loaded: LoadedModel) -> None:
    tokens = make_tokens(12, seed=4)
    (free,) = run(make_engine(loaded), Prompt(0, tokens, greedy(20)))
    (output,) = run(make_engine(loaded), Prompt(0, tokens, greedy(20, stop=("\x00never",))))
    assert (output.token_ids, output.text_length, output.finish_reason) == (free.token_ids, None, "length")


# Sharing


def test_a_prompt_wholly_cached_still_computes_one_token(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, page_size=16)
    tokens = make_tokens(64)
    (first,) = run(engine, Prompt(0, tokens, greedy(4)))
    (second,) = run(engine, Prompt(1, tokens, greedy(4)))
    assert second.token_ids == first.token_ids
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 48)
    (longer,) = run(engine, Prompt(2, [*tokens, 7], greedy(4)))
    assert longer.metrics.cached_tokens == 64


def test_many_requests_with_one_prefix_compute_it_once(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, page_size=16, num_blocks=1024)
    header = make_tokens(160)
    outputs = run(engine, *(Prompt(i, [*header, 10 + i], greedy(2)) for i in range(64)))
    assert sum(output.metrics.cached_tokens for output in outputs) == 63 * 160
    assert (
        engine.stats.computed_tokens == 160 + 64 + 64
    )  # the header, each last prompt token, each first completion token


def test_engines_of_one_process_share_no_blocks(loaded: LoadedModel, tmp_path: Path) -> None:
    """Equal token ids mean other keys and values to another model."""
    prompt = Prompt(0, make_tokens(40), greedy(6))
    other = load_tiny(build_tiny("llama", tmp_path, seed=1))
    (alone,) = run(make_engine(other, page_size=4), prompt)
    first, second = make_engine(loaded, page_size=4), make_engine(other, page_size=4)
    outputs = [run(engine, prompt)[0] for engine in (first, second, first)]
    assert [output.metrics.cached_tokens for output in outputs] == [0, 0, 36]
    assert outputs[1].token_ids == alone.token_ids != outputs[0].token_ids == outputs[2].token_ids


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3])
@pytest.mark.parametrize("max_requests", [1, 2])
def test_steps_of_a_token_or_two_give_the_tokens_of_large_ones(
    loaded: LoadedModel, max_batch_tokens: int, max_requests: int
) -> None:
    prompts = [Prompt(i, make_tokens(5 + 4 * i, seed=i), greedy(6)) for i in range(3)]
    expected = [output.token_ids for output in run(make_engine(loaded), *prompts)]
    limits = {"max_batch_tokens": max_batch_tokens, "max_requests_per_batch": min(max_requests, max_batch_tokens)}
    assert [output.token_ids for output in run(make_engine(loaded, page_size=4, **limits), *prompts)] == expected


def test_memory_that_no_token_was_written_to_is_never_read(loaded: LoadedModel) -> None:
    prompts = [Prompt(i, make_tokens(30 + 7 * i, seed=i), greedy(12)) for i in range(5)]
    expected = [output.token_ids for output in run(make_engine(loaded), *prompts)]
    for settings in ({"max_batch_tokens": 7}, {"page_size": 64}, {"allow_block_sharing": False}):
        engine = make_engine(loaded, **settings)
        engine._runner.key_pages.fill_(float("nan"))  # type: ignore[attr-defined]
        engine._runner.value_pages.fill_(float("nan"))  # type: ignore[attr-defined]
        assert [output.token_ids for output in run(engine, *prompts)] == expected


# The loop


def test_prompts_are_pulled_only_while_few_wait(loaded: LoadedModel) -> None:
    pulled = 0

    def source() -> Iterator[Prompt]:
        nonlocal pulled
        for i in range(1000):
            pulled += 1
            yield Prompt(i, make_tokens(5, seed=i), greedy(2))

    steps = make_engine(loaded, max_requests_per_batch=4).steps(source())
    next(steps)
    assert pulled <= 4 + 2 * 4
    steps.close()


def test_none_means_nothing_ready_and_holds_nothing_up(loaded: LoadedModel) -> None:
    def source() -> Iterator[Prompt | None]:
        yield Prompt(0, make_tokens(5), greedy(6))
        for _ in range(20):
            yield None
        yield Prompt(1, make_tokens(5), greedy(2))

    outputs = [output for step in make_engine(loaded).steps(source()) for output in step]
    assert [output.request_id for output in outputs] == [0, 1]


def test_dropped_requests_are_those_that_never_ran(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_requests_per_batch=2)
    steps = engine.steps(Prompt(i, make_tokens(5, seed=i), greedy(8)) for i in range(6))
    next(steps)
    dropped = engine.drop_waiting()
    finished = [output.request_id for step in steps for output in step]
    assert set(dropped) & set(finished) == set()
    assert {0, 1} <= set(finished)
    assert len(dropped) >= 2


def test_a_caller_that_stops_early_leaves_nothing_behind(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_requests_per_batch=3, num_blocks=24, page_size=8, cpu_offload_space=0.001)
    outputs = engine.generate(Prompt(i, make_tokens(20 + i, seed=i), greedy(5 + 9 * i)) for i in range(9))
    next(outputs)
    outputs.close()
    tokens = make_tokens(9)
    assert [output.request_id for output in engine.generate([Prompt(50, tokens, greedy(2))])] == [50]
    assert engine.stats.cache_usage == 0


def test_prompts_that_are_all_refused_come_back_in_bounded_lists(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_requests_per_batch=4)
    steps = list(engine.steps(Prompt(i, make_tokens(CONTEXT), greedy(1)) for i in range(100)))
    assert sum(map(len, steps)) == 100
    assert max(map(len, steps)) <= 8


def test_no_prompts_give_no_results(loaded: LoadedModel) -> None:
    assert list(make_engine(loaded).generate([])) == []


def test_times_are_in_order_and_add_up(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_blocks=12, page_size=8, max_batch_tokens=16)
    outputs = run(engine, *(Prompt(i, make_tokens(20 + i, seed=i), greedy(1 if i == 3 else 50)) for i in range(6)))
    assert engine.stats.preemptions > 0
    for output in outputs:
        metrics = output.metrics
        assert metrics.queue_s is not None
        assert metrics.prefill_s is not None
        assert metrics.e2e_s is not None
        assert min(metrics.queue_s, metrics.prefill_s) >= 0
        between = len(output.token_ids) - 1
        assert (metrics.itl_mean_s is None) == (between == 0)
        decode_s = (metrics.itl_mean_s or 0.0) * between
        assert metrics.e2e_s == pytest.approx(metrics.queue_s + metrics.prefill_s + decode_s)
    stats = engine.stats
    assert stats.output_tokens == sum(len(output.token_ids) for output in outputs)
    assert stats.prompt_tokens == sum(output.num_prompt_tokens for output in outputs)
    # Every token but each request's last has its KV computed exactly once, or reused, or again after a reset.
    assert stats.computed_tokens + stats.cached_tokens == stats.prompt_tokens + stats.output_tokens - len(outputs)


def test_seeds_decide_samples_whatever_the_order(loaded: LoadedModel) -> None:
    prompts = [
        Prompt(i, make_tokens(9, seed=1), SamplingParams(max_tokens=12, temperature=1.0, seed=i % 3, ignore_eos=True))
        for i in range(6)
    ]
    forward = {output.request_id: output.token_ids for output in make_engine(loaded).generate(prompts)}
    backward = {
        output.request_id: output.token_ids
        for output in make_engine(loaded, max_requests_per_batch=1).generate(prompts[::-1])
    }
    assert forward == backward
    assert forward[0] == forward[3]
    assert len({tuple(tokens) for tokens in forward.values()}) == 3


def test_logits_that_are_not_finite_are_that_rows_error(folder: Path) -> None:
    config = EngineConfig(model=str(folder), dtype="float32", num_blocks=64)
    loaded = load_model(config, inspect_model(config))
    poisoned = 17
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[poisoned] = float("nan")
    engine = Engine.over(loaded, config)
    bad, good, again = run(
        engine,
        Prompt(0, [5] * 40 + [poisoned] * 40, greedy(4)),
        Prompt(1, [5] * 40 + [6, 7], greedy(4)),
        Prompt(2, [5] * 40 + [poisoned] * 40 + [9], greedy(4)),
    )
    assert bad.error is not None
    assert bad.error.code == "non_finite_logits"
    assert "float32" in str(bad.error)
    assert good.error is None
    assert again.error is not None


# The plan


def test_every_setting_has_its_reason(loaded: LoadedModel) -> None:
    settings = make_engine(loaded, page_size=32, num_blocks=9).plan.settings()
    assert all(setting["reason"] for setting in settings.values())
    assert settings["page_size"] == {"value": 32, "reason": "given"}
    assert settings["num_blocks"]["value"] == 9
    for name in ("dtype", "device", "max_batch_tokens", "max_requests_per_batch", "scheduler_type", "num_threads"):
        assert name in settings


def test_a_cache_that_does_not_fit_says_what_would(loaded: LoadedModel) -> None:
    with pytest.raises(DoesNotFitError, match="at most"):
        make_engine(loaded, num_blocks=10**12)


def test_memory_that_is_not_to_be_had_after_all_is_told(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("cbatch.engine.engine.ModelRunner", fail)
    with pytest.raises(DoesNotFitError, match=r"64 blocks is not to be had \(lower num_blocks"):
        make_engine(loaded, num_blocks=64)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"page_size": 0}, "page_size"),
        ({"max_batch_tokens": -1}, "max_batch_tokens"),
        ({"max_memory_percent": 1.5}, "max_memory_percent"),
        ({"scheduler_type": "lifo"}, "fifo"),
        ({"max_model_len": CONTEXT + 1}, str(CONTEXT)),
    ],
)
def test_settings_that_cannot_work_are_usage_errors(
    loaded: LoadedModel, settings: dict[str, object], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        make_engine(loaded, **settings)
