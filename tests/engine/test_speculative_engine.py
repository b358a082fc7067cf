"""Drafts on a tiny model: with them and without them every request gets the same, to the bit.

`deterministic` makes the comparison exact. The drafts are those that a run without any would accept, but for wrong ones
in between; `PromptLookup` itself is held in test_speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cbatch.config import SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt, RequestMetrics, RequestOutput
from cbatch.engine.results import LaunchedStep
from cbatch.engine.runner import ModelRunner
from cbatch.engine.speculation import PromptLookup
from cbatch.engine.step import StepPlan
from cbatch.models.load import LoadedModel
from tests.engine.drafts import know
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import EOS_ID, build_tiny

HEADER = make_tokens(20, seed=77)
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "n": 3},
    {"repetition_penalty": 1.4, "logprobs": 2},
    {"frequency_penalty": 1.2, "presence_penalty": 0.5, "temperature": 0.7, "logprobs": 0},
    {"logit_bias": ((40, 6.0), (41, 6.0)), "temperature": 1.0},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": ((EOS_ID, 12.0),), "logprobs": 1},
    {"regex": "(ab|ba|[0-9]{3} )+", "ignore_eos": False, "temperature": 1.0, "logprobs": 1},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}', "ignore_eos": False},
    {"choice": ("yes it is", "no it is not"), "ignore_eos": False, "min_tokens": 3},
    {"min_p": 0.05, "temperature": 1.5, "prompt_logprobs": 1},
    {"max_tokens": 2},
    {"max_tokens": 1, "logprobs": 1},
]


def make_prompts() -> list[Prompt]:
    return [
        Prompt(
            i,
            (HEADER if i % 2 else []) + make_tokens(5 + 3 * i, seed=i),
            SamplingParams(**({"max_tokens": 30, "ignore_eos": True, "seed": i} | asked)),
        )
        for i, asked in enumerate(ASKED)
    ]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny(request.param, tmp_path_factory.mktemp(request.param)))


def complete(loaded: LoadedModel, prompts: Sequence[Prompt], **settings: Any) -> tuple[list[RequestOutput], Engine]:
    defaults = {"deterministic": True, "page_size": 8, "num_blocks": 300, "safety_margin": 0.0}
    engine = make_engine(loaded, **(defaults | settings))
    return run(engine, *prompts), engine


def essence(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """All that an output says of tokens; times and counts of work left out."""
    return [replace(output, metrics=RequestMetrics(), samples=tuple(essence(output.samples))) for output in outputs]


def texts(outputs: Iterable[RequestOutput], prompts: Iterable[Prompt]) -> list[list[int]]:
    return [
        [*prompt.token_ids, *sample.token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.samples or (output,)
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "ample": {},
    "small chunks": {"max_batch_tokens": 7},
    "few logits": {"max_requests_per_batch": 6},
    "soft resets": {"num_blocks": 40},
    "offloads": {"num_blocks": 40, "cpu_offload_space": 0.01},
    "prompts first": {"scheduler_type": "prefill_first", "allow_block_sharing": False},
}


@pytest.fixture(scope="module")
def calm(loaded: LoadedModel) -> tuple[list[RequestOutput], Engine]:
    """What the prompts get without drafts."""
    outputs, engine = complete(loaded, make_prompts(), speculation=False)
    assert engine.stats.drafted_tokens == 0
    assert all(output.error is None for output in outputs)
    return outputs, engine


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_a_request_asks_for_it_gets_the_same(
    loaded: LoadedModel, calm: tuple[list[RequestOutput], Engine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain, prompts = calm[0], make_prompts()
    know(monkeypatch, texts(plain, prompts))
    outputs, engine = complete(loaded, prompts, speculation=True, **SETTINGS[name])
    assert essence(outputs) == essence(plain)
    stats = engine.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert (stats.preemptions > 0) == ("num_blocks" in SETTINGS[name])
    assert stats.output_tokens == calm[1].stats.output_tokens
    if not SETTINGS[name]:
        assert stats.steps < calm[1].stats.steps * 0.7


def test_a_stop_among_drafts_that_are_right_ends_where_it_does_without_them(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = make_tokens(12, seed=3)
    free = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1)
    (whole,), _ = complete(loaded, [Prompt(0, tokens, free)], speculation=False)
    text = whole.text(loaded.tokenizer.decode)
    ends: list[dict[str, Any]] = [{"stop": (text[at : at + 3],)} for at in (0, 5, 6, 7, 8, 9, len(text) - 3)]
    ends += [{"stop_token_ids": (whole.token_ids[at],)} for at in range(2, 9)]
    ends += [{"stop": (text[6:9],), "include_stop_str_in_output": True}, {"max_tokens": 7}]
    prompts = [
        Prompt(i, tokens, SamplingParams(**({"max_tokens": 30, "ignore_eos": True, "logprobs": 1} | end)))
        for i, end in enumerate(ends)
    ]
    plain, _ = complete(loaded, prompts, speculation=False)
    assert len({len(output.token_ids) for output in plain}) > 6
    know(monkeypatch, texts([whole], prompts[:1]))
    outputs, engine = complete(loaded, prompts, speculation=True)
    assert essence(outputs) == essence(plain)
    assert all(output.logprobs and len(output.logprobs.tokens) == len(output.token_ids) for output in outputs)
    assert engine.stats.output_tokens == sum(len(output.token_ids) for output in outputs)


def test_the_look_up_itself_finds_what_a_prompt_says(loaded: LoadedModel) -> None:
    """A completion that is bound to say what the prompt says is drafted from it."""
    sentence = "the sand and the hand is in the sand of the land"
    prompt = Prompt(0, loaded.tokenizer.encode(f"Say: {sentence}! {sentence[:12]}"), SamplingParams(choice=(sentence,)))
    plain, calm = complete(loaded, [prompt], speculation=False)
    outputs, engine = complete(loaded, [prompt])
    assert essence(outputs) == essence(plain)
    assert engine.plan.speculation > 0
    assert engine.stats.accepted_tokens >= 10
    assert engine.stats.steps <= calm.stats.steps - 10


def test_times_are_in_order_and_add_up(
    loaded: LoadedModel, calm: tuple[list[RequestOutput], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    know(monkeypatch, texts(calm[0], prompts))
    outputs, _ = complete(loaded, prompts, speculation=True)
    for output in outputs:
        if output.samples:
            continue
        metrics = output.metrics
        assert metrics.queue_s is not None
        assert metrics.prefill_s is not None
        between = len(output.token_ids) - 1
        decode_s = (metrics.itl_mean_s or 0.0) * between
        assert metrics.e2e_s == pytest.approx(metrics.queue_s + metrics.prefill_s + decode_s)
        assert len(metrics.token_times) == len(output.token_ids)


def test_a_step_that_finds_no_memory_is_tried_again_without_drafts(
    loaded: LoadedModel, calm: tuple[list[RequestOutput], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, prompts = calm[0][:6], make_prompts()[:6]
    know(monkeypatch, texts(plain, prompts))
    launch: Callable[[ModelRunner, StepPlan], LaunchedStep] = ModelRunner.launch
    failed: list[int] = []

    def fail_twice(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        num_drafts = sum(len(item.drafts) for item in plan.items)
        if num_drafts > 2 and len(failed) < 2:
            failed.append(num_drafts)
            raise MemoryError
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_twice)
    outputs, engine = complete(loaded, prompts, speculation=True)
    assert essence(outputs) == essence(plain)
    assert engine.stats.out_of_memory_steps == len(failed) == 2


@pytest.mark.parametrize(
    ("asked", "settings", "value", "reason"),
    [
        (True, {}, 512, "given: drafts fill every step"),
        (False, {}, 0, "given"),
        (None, {}, 8, "small steps"),
        (None, {"max_batch_tokens": 5}, 5, "small steps"),
    ],
)
def test_it_is_a_setting_with_a_reason(
    loaded: LoadedModel, asked: bool | None, settings: dict[str, Any], value: int, reason: str
) -> None:
    plan = make_engine(loaded, speculation=asked, **settings).plan
    assert plan.speculation == value
    assert reason in plan.reasons["speculation"]


def test_a_large_batch_has_no_drafts_unless_asked(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "propose", lambda self, token_ids, most: (5,))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [Prompt(i, [5, 6] * 6, params) for i in range(8)]
    assert complete(loaded, prompts)[1].stats.drafted_tokens == 0
    assert complete(loaded, prompts, speculation=True)[1].stats.drafted_tokens > 0
