"""What a request may ask for, as its text and tokens show it: every row by itself. On a tiny Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.models.load import LoadedModel
from tests.engine.reference import count_near_ties, generate_references
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import EOS_ID, VOCAB_SIZE, build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_tiny(folder)


def complete(loaded: LoadedModel, tokens: list[int], **params: object) -> RequestOutput:
    (output,) = run(make_engine(loaded), Prompt(0, tokens, SamplingParams(**params)))  # type: ignore[arg-type]
    return output


def text_of(loaded: LoadedModel, output: RequestOutput) -> str:
    return output.text(loaded.tokenizer.decode)


# Sampling


def test_a_repetition_penalty_gives_the_tokens_of_transformers(folder: Path, loaded: LoadedModel) -> None:
    prompts = [make_tokens(n, seed=n) for n in (3, 20, 41)]
    references = generate_references(folder, prompts, [30] * 3, repetition_penalty=1.3)
    params = SamplingParams(max_tokens=30, repetition_penalty=1.3, ignore_eos=True)
    outputs = run(make_engine(loaded), *(Prompt(i, tokens, params) for i, tokens in enumerate(prompts)))
    assert count_near_ties(references, [output.token_ids for output in outputs]) == 0
    plain = generate_references(folder, prompts, [30] * 3)
    assert [r.token_ids for r in plain] != [r.token_ids for r in references]


@pytest.mark.parametrize(
    "settings",
    [{"num_blocks": 12, "page_size": 8}, {"max_batch_tokens": 7}, {"max_requests_per_batch": 1}],
    ids=["preempted", "chunked", "alone"],
)
def test_rows_ask_for_different_things_and_none_depends_on_another(
    loaded: LoadedModel, settings: dict[str, object]
) -> None:
    asked: list[dict[str, object]] = [
        {},
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 1.05, "temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"presence_penalty": 1.5, "logit_bias": ((40, 3.0),)},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.1, "seed": 2},
        {"temperature": 1.0, "seed": 3},
    ]
    prompts = [
        Prompt(i, make_tokens(20 + i, seed=i), SamplingParams(max_tokens=60, ignore_eos=True, **params))  # type: ignore[arg-type]
        for i, params in enumerate(asked)
    ]
    expected = [output.token_ids for output in run(make_engine(loaded), *prompts)]
    engine = make_engine(loaded, **settings)
    assert [output.token_ids for output in run(engine, *prompts[::-1])] == expected
    assert (engine.stats.soft_resets > 0) == ("page_size" in settings)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(tmp_path: Path, temperature: float) -> None:
    folder = build_tiny("llama", tmp_path)
    num_tokens = load_tiny(folder).tokenizer.num_tokens
    assert num_tokens < VOCAB_SIZE
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[num_tokens:] = head[:num_tokens].mean(0) + torch.randn(VOCAB_SIZE - num_tokens, head.shape[1]) * 20
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = Engine.load(EngineConfig(model=str(folder), dtype="float32", num_blocks=64))
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    outputs = run(engine, *(Prompt(i, make_tokens(5, i), params) for i in range(8)))
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(tokens) == 8 * 40
    assert max(tokens) < num_tokens


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_tokens_that_the_model_does_not_have_are_that_rows_error(loaded: LoadedModel, name: str) -> None:
    value = ((VOCAB_SIZE, 1.0),) if name == "logit_bias" else (VOCAB_SIZE,)
    output = complete(loaded, make_tokens(4), **{name: value})
    assert output.error is not None
    assert output.error.code == "bad_parameter"
    assert f"{name} names token {VOCAB_SIZE}: the model's vocabulary is 0 to {VOCAB_SIZE - 1}" in str(output.error)


# Stopping


def test_nothing_but_max_tokens_ends_a_completion_before_min_tokens(loaded: LoadedModel) -> None:
    tokens, eos_likely = make_tokens(6), ((EOS_ID, 100.0),)
    for least in (0, 1, 7):
        output = complete(loaded, tokens, max_tokens=20, min_tokens=least, logit_bias=eos_likely)
        assert output.token_ids.index(EOS_ID) == least == len(output.token_ids) - 1
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    free = complete(loaded, tokens, max_tokens=20, ignore_eos=True)
    stop = loaded.tokenizer.decode(free.token_ids[:1])
    assert stop
    output = complete(loaded, tokens, max_tokens=20, min_tokens=5, stop=(stop,), ignore_eos=True)
    assert output.token_ids[:5] == free.token_ids[:5]
    assert len(output.token_ids) > 5
    banned = complete(loaded, tokens, max_tokens=20, min_tokens=3, stop_token_ids=(free.token_ids[0],), ignore_eos=True)
    assert free.token_ids[0] not in banned.token_ids[:3]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_text_before_or_behind_itself(loaded: LoadedModel, include: bool) -> None:
    tokens = make_tokens(9, seed=2)
    free = complete(loaded, tokens, max_tokens=20, ignore_eos=True)
    ending = free.token_ids[6]
    count = free.token_ids.index(ending) + 1
    params = {"stop_token_ids": (ending, 3), "include_stop_str_in_output": include, "ignore_eos": True}
    output = complete(loaded, tokens, max_tokens=20, **params)
    assert output.token_ids == free.token_ids[:count]
    assert (output.finish_reason, output.stop_reason) == ("stop", ending)
    assert text_of(loaded, output) == loaded.tokenizer.decode(free.token_ids[: count if include else count - 1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_a_special_token_stops_there(loaded: LoadedModel, include: bool) -> None:
    end = loaded.tokenizer.special_token_id("<|im_end|>")
    assert end is not None
    tokens = make_tokens(6)
    free = complete(loaded, tokens, max_tokens=4, ignore_eos=True)
    params = {"stop": ("<|im_end|>",), "include_stop_str_in_output": include, "ignore_eos": True}
    output = complete(loaded, tokens, max_tokens=9, min_tokens=4, logit_bias=((end, 100.0),), **params)
    assert output.token_ids == [*free.token_ids, end]
    assert (output.finish_reason, output.stop_reason) == ("stop", "<|im_end|>")
    assert text_of(loaded, output) == loaded.tokenizer.decode(free.token_ids) + ("<|im_end|>" if include else "")


def test_a_stop_string_is_kept_where_asked(loaded: LoadedModel) -> None:
    tokens = make_tokens(12, seed=3)
    text = text_of(loaded, complete(loaded, tokens, max_tokens=30, ignore_eos=True))
    stop = text[10:13]
    output = complete(loaded, tokens, max_tokens=30, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert text_of(loaded, output) == text[: text.index(stop)] + stop


def test_the_prompt_takes_no_part_in_stopping(loaded: LoadedModel) -> None:
    tokens = loaded.tokenizer.encode("stop it\n")
    output = complete(loaded, tokens, max_tokens=12, ignore_eos=True, stop=("stop it", "it\n"))
    free = complete(loaded, tokens, max_tokens=12, ignore_eos=True)
    assert output.token_ids == free.token_ids


def test_a_tail_held_back_for_a_stop_that_never_came_is_in_the_text(loaded: LoadedModel) -> None:
    tokens = make_tokens(12, seed=5)
    free = complete(loaded, tokens, max_tokens=10, ignore_eos=True)
    text = text_of(loaded, free)
    for stop in (text[-3:] + "never", text[-1:] * 2 + "never"):
        output = complete(loaded, tokens, max_tokens=10, ignore_eos=True, stop=(stop,))
        assert (text_of(loaded, output), output.finish_reason) == (text, "length")


def test_each_row_of_a_batch_ends_by_its_own_condition(loaded: LoadedModel) -> None:
    likely = {"logit_bias": ((EOS_ID, 100.0),), "max_tokens": 60}
    first, second, third = run(
        make_engine(loaded),
        Prompt(0, make_tokens(4), SamplingParams(min_tokens=3, **likely)),  # type: ignore[arg-type]
        Prompt(1, make_tokens(5), SamplingParams(min_tokens=50, **likely)),  # type: ignore[arg-type]
        Prompt(2, make_tokens(6), SamplingParams(ignore_eos=True, max_tokens=60)),
    )
    assert [len(output.token_ids) for output in (first, second, third)] == [4, 51, 60]
    assert [output.finish_reason for output in (first, second, third)] == ["stop", "stop", "length"]


def test_a_completion_that_begins_with_its_stop_is_empty_and_says_why(loaded: LoadedModel) -> None:
    tokens = make_tokens(12, seed=3)
    first = text_of(loaded, complete(loaded, tokens, max_tokens=30, ignore_eos=True))[0]
    output = complete(loaded, tokens, max_tokens=30, ignore_eos=True, stop=(first,))
    assert (text_of(loaded, output), output.finish_reason, output.stop_reason) == ("", "stop", first)


def test_every_end_token_of_the_generation_config_ends_a_row_and_none_where_it_ignores_them(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    loaded = load_tiny(folder)
    for end in (2, 7, 9):
        likely = {"logit_bias": ((end, 100.0),), "max_tokens": 50}
        ended = complete(loaded, make_tokens(5), min_tokens=4, **likely)
        assert (ended.finish_reason, ended.stop_reason, ended.token_ids[4:]) == ("stop", None, [end])
        assert text_of(loaded, ended) == loaded.tokenizer.decode(ended.token_ids[:4])
        ignoring = complete(loaded, make_tokens(5), ignore_eos=True, **likely)
        assert (ignoring.finish_reason, ignoring.token_ids) == ("length", [end] * 50)


# The batch


def test_special_tokens_in_a_prompt_are_tokens_like_others_and_nobody_pads(folder: Path, loaded: LoadedModel) -> None:
    """Padding, BOS and EOS in the middle, at the start and at the end, beside shorter rows."""
    prompts = [[2, *make_tokens(9)], [*make_tokens(4), 0, 2, 1, *make_tokens(30)], [0], [*make_tokens(3), 2], [1, 1, 5]]
    references = generate_references(folder, prompts, [12] * len(prompts))
    params = SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=0.0)
    outputs = run(make_engine(loaded), *(Prompt(i, tokens, params) for i, tokens in enumerate(prompts)))
    assert count_near_ties(references, [output.token_ids for output in outputs]) == 0


@pytest.mark.parametrize("max_batch_tokens", [1, 16, 512])
def test_a_prompt_gives_one_answer_alone_eight_times_over_and_from_the_cache(
    folder: Path, loaded: LoadedModel, max_batch_tokens: int
) -> None:
    tokens, params = make_tokens(50, seed=8), SamplingParams(max_tokens=20, ignore_eos=True)
    engine = make_engine(loaded, max_batch_tokens=max_batch_tokens)
    (alone,) = run(engine, Prompt(0, tokens, params))
    assert alone.metrics.cached_tokens == 0
    outputs = run(engine, *(Prompt(i, tokens, params) for i in range(8)))
    assert all(output.metrics.cached_tokens == 48 for output in outputs)
    references = generate_references(folder, [tokens] * 9, [20] * 9)
    assert count_near_ties(references, [output.token_ids for output in (alone, *outputs)]) == 0


def test_what_a_type_cannot_hold_is_an_error_of_every_row_and_never_token_0(tmp_path: Path) -> None:
    """Models trained in bfloat16 overflow float16: their logits are NaN, of which argmax makes token 0."""
    folder = build_tiny("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    down = weights["model.layers.0.mlp.down_proj.weight"]
    for dtype, largest, way_out in (("float16", 6e4, "try --dtype float32"), ("float32", 3e38, "damaged")):
        scaled = {**weights, "model.layers.0.mlp.down_proj.weight": down * (largest / down.abs().max())}
        save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
        config = EngineConfig(model=str(folder), dtype=dtype, num_blocks=64)  # type: ignore[arg-type]
        outputs = run(Engine.load(config), *(Prompt(i, make_tokens(5, i), SamplingParams()) for i in range(3)))
        assert [output.error and output.error.code for output in outputs] == ["non_finite_logits"] * 3
        assert all(dtype in str(output.error) and way_out in str(output.error) for output in outputs)
