"""Log-probabilities of generated and of prompt tokens, against one plain forward pass of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cbatch.config import SamplingParams
from cbatch.engine.record import TokenLogprobs
from cbatch.engine.request import Prompt
from cbatch.models.load import LoadedModel
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import CONTEXT, EOS_ID, build_tiny

ROUNDING = 2e-4  # of float32 arithmetic in another order, on logits of about 10


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_tiny(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def check(
    plain: torch.nn.Module, scores: TokenLogprobs | None, num_top: int, before: list[int], ids: list[int]
) -> None:
    """Compare with the model's own log-probabilities of `ids` after `before`."""
    assert scores is not None
    with torch.inference_mode():
        logits = plain(torch.tensor([before + ids])).logits[0].float()
    expected = torch.log_softmax(logits, dim=-1)[len(before) - 1 : -1]
    assert len(scores.tokens) == len(ids)
    own = expected.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.tokens), own, atol=ROUNDING, rtol=0)
    if num_top == 0:
        assert scores.top is None
        return
    assert scores.top is not None
    assert len(scores.top) == len(ids)
    for place, top in enumerate(scores.top):
        assert top is not None
        assert len({token for token, _ in top}) == len(top) == num_top
        values = torch.tensor([value for _, value in top])
        torch.testing.assert_close(values, expected[place, [token for token, _ in top]], atol=ROUNDING, rtol=0)
        best = expected[place, :288].topk(num_top).values  # of the tokens that the tokenizer has
        torch.testing.assert_close(values, best, atol=ROUNDING, rtol=0)


SETTINGS = {
    "ample": {},
    "chunked": {"max_batch_tokens": 7},
    "few": {"max_requests_per_batch": 3},
    "preempted": {"num_blocks": 14, "page_size": 8, "max_batch_tokens": 40},
    "offloaded": {"num_blocks": 14, "page_size": 8, "cpu_offload_space": 0.001},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_they_are_those_of_transformers_whatever_the_schedule(
    loaded: LoadedModel, plain: torch.nn.Module, name: str
) -> None:
    asked: list[dict[str, object]] = [
        {"logprobs": 3, "temperature": 1.0, "seed": 1},
        {"prompt_logprobs": 2},
        {},
        {"logprobs": 0, "prompt_logprobs": 0, "repetition_penalty": 1.5, "logit_bias": ((7, 4.0),)},
        {"prompt_logprobs": 4, "max_tokens": 0},
        {"logprobs": 1, "prompt_logprobs": 1},
    ]
    header = make_tokens(16)
    prompts = [
        Prompt(
            i, header + make_tokens(9 + 3 * i, seed=i), SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | a))
        )
        for i, a in enumerate(asked)
    ]
    bare = {"logprobs": None, "prompt_logprobs": None}
    engine = make_engine(loaded, **SETTINGS[name])
    outputs = run(engine, *prompts)
    for prompt, output, params in zip(prompts, outputs, asked, strict=True):
        assert output.error is None
        assert (output.logprobs is None) == (params.get("logprobs") is None)
        assert (output.prompt_logprobs is None) == (params.get("prompt_logprobs") is None)
        if output.logprobs is not None:
            check(plain, output.logprobs, int(str(params["logprobs"])), prompt.token_ids, output.token_ids)
        if (scores := output.prompt_logprobs) is not None:
            assert scores.tokens[0] is None
            rest = TokenLogprobs(scores.tokens[1:], scores.top[1:] if scores.top else None)
            check(plain, rest, int(str(params["prompt_logprobs"])), prompt.token_ids[:1], prompt.token_ids[1:])
        assert len(output.token_ids) == params.get("max_tokens", 40)
    if "page_size" in SETTINGS[name]:
        assert engine.stats.preemptions > 0
    assert engine.stats.output_tokens == sum(len(output.token_ids) for output in outputs)
    unscored = [
        Prompt(p.request_id, p.token_ids, SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | a | bare)))
        for p, a in zip(prompts, asked, strict=True)
    ]
    assert [o.token_ids for o in run(make_engine(loaded), *unscored)] == [o.token_ids for o in outputs]


def test_a_prompt_that_is_cached_is_scored_all_the_same(loaded: LoadedModel, plain: torch.nn.Module) -> None:
    engine, tokens = make_engine(loaded), make_tokens(70)
    run(engine, Prompt(0, tokens, SamplingParams(max_tokens=1)))
    (output,) = run(engine, Prompt(1, tokens, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    assert output.prompt_logprobs is not None
    check(plain, TokenLogprobs(output.prompt_logprobs.tokens[1:], None), 0, tokens[:1], tokens[1:])
    assert output.metrics.cached_tokens == 0


def test_a_step_never_computes_more_logits_than_it_has_requests(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(loaded, max_requests_per_batch=5, max_batch_tokens=64)
    most = 0
    forward = engine._runner._model.forward  # type: ignore[attr-defined]

    def spy(*args: object, logits_to_keep: torch.Tensor, **kwargs: object) -> object:
        nonlocal most
        most = max(most, len(logits_to_keep))
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    monkeypatch.setattr(engine._runner._model, "forward", spy)  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    outputs = run(engine, *(Prompt(i, make_tokens(30 + i, seed=i), params) for i in range(7)))
    assert most == 5
    assert all(
        output.prompt_logprobs and len(output.prompt_logprobs.tokens) == 30 + i for i, output in enumerate(outputs)
    )


@pytest.mark.parametrize("num_prompt", [1, 2, CONTEXT - 1, CONTEXT])
def test_scoring_takes_prompts_up_to_the_whole_context(loaded: LoadedModel, num_prompt: int) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = run(make_engine(loaded), Prompt(0, make_tokens(num_prompt), params))
    assert (output.finish_reason, output.token_ids, output.error) == ("length", [], None)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs.tokens) == num_prompt
    assert output.prompt_logprobs.tokens[0] is None
    assert None not in output.prompt_logprobs.tokens[1:]


def test_no_tokens_and_no_scores_need_no_computing(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    empty, too_long = run(
        engine,
        Prompt(0, make_tokens(CONTEXT), SamplingParams(max_tokens=0, logprobs=2)),
        Prompt(1, make_tokens(CONTEXT + 1), SamplingParams(max_tokens=0)),
    )
    assert (empty.finish_reason, empty.token_ids, empty.error) == ("length", [], None)
    assert empty.logprobs == TokenLogprobs([], [])
    assert too_long.error is not None
    assert too_long.error.code == "prompt_too_long"
    assert engine.stats.steps == 0


def test_special_tokens_are_among_the_likeliest_and_the_end_has_its_score(loaded: LoadedModel) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, logit_bias=((EOS_ID, 100.0),), logprobs=288)
    (output,) = run(make_engine(loaded), Prompt(0, make_tokens(5), params))
    assert output.token_ids[-1] == EOS_ID
    assert output.logprobs is not None
    assert output.logprobs.top is not None
    assert len(output.logprobs.tokens) == 4
    assert all(sorted(token for token, _ in top or ()) == list(range(288)) for top in output.logprobs.top)
    assert dict(output.logprobs.top[3] or ())[EOS_ID] == output.logprobs.tokens[3]


def test_more_tokens_than_there_are_is_that_rows_error(loaded: LoadedModel) -> None:
    bad, good = run(
        make_engine(loaded),
        Prompt(0, make_tokens(5), SamplingParams(max_tokens=2, logprobs=289)),
        Prompt(1, make_tokens(5), SamplingParams(max_tokens=2, ignore_eos=True)),
    )
    assert bad.error is not None
    assert (bad.error.code, str(bad.error)) == ("bad_parameter", "logprobs asks for 289 tokens: the vocabulary has 288")
    assert len(good.token_ids) == 2


@pytest.fixture
def poisoned(loaded: LoadedModel) -> Iterator[int]:
    weight = loaded.model.get_input_embeddings().weight
    with torch.no_grad():
        kept = weight[17].clone()
        weight[17] = float("nan")
        yield 17
        weight[17] = kept


def test_a_prompt_whose_logits_are_not_finite_is_that_rows_error(loaded: LoadedModel, poisoned: int) -> None:
    prompt = [5] * 20 + [poisoned] + [6] * 30
    (output,) = run(make_engine(loaded), Prompt(0, prompt, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    assert output.error is not None
    assert output.error.code == "non_finite_logits"
