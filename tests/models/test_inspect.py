"""The shape that a config states, and the models that are refused by name, with no weights anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from cbatch.config import EngineConfig
from cbatch.errors import UnsupportedModelError, UsageError
from cbatch.models.inspect import ModelShape, describe_model, inspect_model
from cbatch.models.source import ModelSource
from cbatch.models.support import refusal
from tests.tiny_models import CONTEXT, FAMILIES, VOCAB_SIZE, WINDOW, build_tiny_model


def write_config(folder: Path, model_type: str, *, without: tuple[str, ...] = (), **settings: Any) -> Path:
    """Write a config.json alone: what is read from here cannot have come from weights."""
    config = AutoConfig.for_model(model_type, **settings).to_dict()
    for name in without:
        config.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shape_of(model_type: str, max_model_len: int | None = None, **settings: Any) -> ModelShape:
    config = AutoConfig.for_model(model_type, **settings)
    return describe_model(config, ModelSource("tiny"), max_model_len)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted_and_its_shape_is_the_models(family: str) -> None:
    model = build_tiny_model(family)
    assert refusal(model.config) is None
    shape = describe_model(model.config, ModelSource("tiny"))
    assert shape.context_length == CONTEXT
    assert shape.vocab_size == VOCAB_SIZE == model.get_output_embeddings().weight.shape[0]
    assert shape.hidden_size == model.get_input_embeddings().weight.shape[1]
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
    assert shape.num_layers == len(layers) == len(shape.layer_types) == len(shape.sliding_windows)


def test_the_head_size_is_the_stated_one_else_the_quotient() -> None:
    assert shape_of("llama", hidden_size=64, num_attention_heads=4).head_dim == 16
    assert shape_of("qwen3", hidden_size=64, num_attention_heads=4, head_dim=32).head_dim == 32


def test_gpt2s_old_names_are_read() -> None:
    shape = shape_of("gpt2", n_embd=64, n_head=4, n_layer=3, n_positions=77, n_inner=None)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 4, 16)
    assert (shape.context_length, shape.intermediate_size) == (77, 256)


def test_one_kv_head_for_all_is_read() -> None:
    assert shape_of("gpt_bigcode", multi_query=True, n_head=4, n_embd=64).num_kv_heads == 1


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1000),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 1000),
    ],
)
def test_the_context_counts_stretched_positions_once(rope: dict[str, Any], expected: int) -> None:
    assert shape_of("llama", max_position_embeddings=1000, rope_parameters=rope).context_length == expected


def test_a_window_without_layer_types_applies_everywhere() -> None:
    assert shape_of("mistral", num_hidden_layers=2, sliding_window=8).sliding_windows == (8, 8)
    assert shape_of("mistral", num_hidden_layers=2, sliding_window=None).sliding_windows == (None, None)


def test_a_window_that_is_switched_off_applies_nowhere() -> None:
    shape = shape_of("qwen2", num_hidden_layers=2, sliding_window=8, use_sliding_window=False)
    assert shape.sliding_windows == (None, None)
    assert shape.layer_types == ("full_attention", "full_attention")
    shape = shape_of("qwen3_moe", num_hidden_layers=2, sliding_window=8, use_sliding_window=False)
    assert shape.sliding_windows == (None, None)


def test_a_window_with_all_layers_full_applies_nowhere() -> None:
    shape = shape_of("olmo3", num_hidden_layers=2, sliding_window=8, layer_types=["full_attention"] * 2)
    assert shape.sliding_windows == (None, None)


def test_a_window_that_no_context_outgrows_is_none() -> None:
    assert shape_of("mistral", WINDOW, num_hidden_layers=1, sliding_window=WINDOW).sliding_windows == (None,)
    assert shape_of("mistral", WINDOW + 1, num_hidden_layers=1, sliding_window=WINDOW).sliding_windows == (WINDOW,)


@pytest.mark.parametrize(
    ("without", "added"),
    [
        (("layer_types",), {"sliding_window_pattern": 3}),
        (("sliding_window_pattern",), {}),
        (("layer_types", "sliding_window_pattern"), {}),
    ],
    ids=["pattern only", "layer_types only", "neither"],
)
def test_gemma3s_pattern_is_read_as_transformers_reads_it(
    without: tuple[str, ...], added: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, "gemma3_text", without=without, num_hidden_layers=12, sliding_window=WINDOW)
    content = json.loads((folder / "config.json").read_text()) | added
    (folder / "config.json").write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(folder)
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32}
    config.update({**small, "intermediate_size": 32})
    model = AutoModelForCausalLM.from_config(config)
    used = tuple(layer.self_attn.sliding_window for layer in model.model.layers)
    assert inspect_model(EngineConfig(model=str(folder))).sliding_windows == used
    assert {None, WINDOW} == set(used)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("bert", {}, "is an encoder"),
        ("bloom", {}, "alibi"),
        ("mpt", {}, "alibi"),
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {}, "attention interface"),
        ("stablelm", {}, "attention interface"),
        ("mamba", {}, "linear attention layers|recurrent state"),
        ("falcon_mamba", {}, "linear attention layers|recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("jamba", {}, "linear attention layers"),
        ("falcon_h1", {}, "hybrid layers"),
        ("qwen3_next", {}, "linear attention layers"),
        ("recurrent_gemma", {}, "linear attention|recurrent"),
        ("llama4_text", {}, "chunked attention layers"),
        ("deepseek_v3", {}, "latent attention"),
        ("gemma3n_text", {}, "shares keys and values"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma2", {"sliding_window": None}, "states no sliding_window"),
        ("mllama", {}, "multimodal"),
        ("qwen2_vl", {}, "does not generate text from text alone"),
        ("clip", {}, "does not generate text from text alone"),
        ("diffllama", {}, "attends twice"),
        ("doge", {}, "its own attention mask"),
        ("hrm_text", {}, "several times"),
        ("jetmoe", {}, "more keys and values than it caches"),
        ("llama4_text", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "positions that it counts"),
        ("mimo_v2_flash", {}, "differ in number and size"),
        ("nemotron", {}, "does not hand on"),
        ("gemma4_text", {"num_kv_shared_layers": 0}, "heads differ in number or size"),
        ("phimoe", {"sliding_window": WINDOW}, "its sliding windows"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, "its sliding"),
    ],
)
def test_what_cannot_run_is_refused_by_name_from_the_config_alone(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, model_type, **settings)
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        inspect_model(EngineConfig(model=str(folder)))
    assert raised.value.hint
    assert model_type in raised.value.message


def test_a_window_that_attention_is_not_told_of_may_be_one_that_nothing_outgrows(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "phimoe", sliding_window=WINDOW)
    shape = inspect_model(EngineConfig(model=str(folder), max_model_len=WINDOW))
    assert set(shape.sliding_windows) == {None}


def test_layer_types_of_another_number_of_layers_are_refused() -> None:
    config = AutoConfig.for_model("olmo3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    config.layer_types = ["full_attention"] * 3
    assert "3 layer types for 2 layers" in (refusal(config) or "")


def test_the_text_half_of_a_multimodal_gemma3_is_described() -> None:
    shape = shape_of("gemma3", text_config={"num_hidden_layers": 6, "sliding_window": WINDOW, "vocab_size": 99})
    assert (shape.num_layers, shape.vocab_size) == (6, 99)
    assert shape.sliding_windows.count(WINDOW) == 5


def test_a_config_without_context_length_is_a_usage_error() -> None:
    config = PretrainedConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=8, vocab_size=9)
    with pytest.raises(UsageError, match="max_position_embeddings"):
        describe_model(config, ModelSource("tiny"))


def test_an_unknown_architecture_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "not_there_yet"}')
    with pytest.raises(UnsupportedModelError, match="does not know the architecture") as raised:
        inspect_model(EngineConfig(model=str(tmp_path)))
    assert "upgrade" in (raised.value.hint or "")


@pytest.mark.parametrize("content", ["{", '{"model_type": "llama", "hidden_size": "big"}', "[]", "{}"])
def test_a_damaged_config_is_a_usage_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="config"):
        inspect_model(EngineConfig(model=str(tmp_path)))


def test_a_model_with_code_of_its_own_names_the_flag_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    auto_map = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_model", "auto_map": auto_map}))
    (tmp_path / "code.py").write_text("raise SystemExit('code was run')\n")
    with pytest.raises(UsageError, match="code of its own") as raised:
        inspect_model(EngineConfig(model=str(tmp_path)))
    assert "--trust-remote-code" in (raised.value.hint or "")
