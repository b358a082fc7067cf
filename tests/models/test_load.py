"""Loading: what is in memory afterwards, and one clear error for every way in which a checkpoint can be broken."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch.config import EngineConfig
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.models import load as load_module
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from cbatch.models.memory import FreeMemory
from tests.tiny_models import EOS_ID, VOCAB_SIZE, build_tiny, build_tiny_model


def load(config: EngineConfig) -> LoadedModel:
    return load_model(config, inspect_model(config))


def num_parameters() -> int:
    return sum(parameter.numel() for parameter in build_tiny_model("llama").parameters())


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def test_a_loaded_model_is_ready_for_inference(tiny_llama: Path) -> None:
    loaded = load(EngineConfig(model=str(tiny_llama), device="cpu"))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32} == {loaded.dtype}
    assert loaded.model.config._attn_implementation == "cbatch"
    assert loaded.device == torch.device("cpu")
    assert loaded.eos_token_ids == {EOS_ID}
    assert loaded.tokenizer.vocab_size == VOCAB_SIZE
    assert loaded.num_threads == torch.get_num_threads()
    assert loaded.device_reason == "given"
    assert loaded.dtype_reason
    assert loaded.num_threads_reason


def test_the_dtype_asked_for_is_that_of_all_weights(tiny_llama: Path) -> None:
    loaded = load(EngineConfig(model=str(tiny_llama), device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16} == {loaded.dtype}


def test_weights_that_memory_does_not_hold_are_refused_before_they_load(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * num_parameters()
    monkeypatch.setattr(load_module, "free_memory", lambda _: FreeMemory(needed - 1, "the container's memory limit"))
    monkeypatch.setattr(load_module, "_load_weights", lambda *_: pytest.fail("they are loaded"))
    with pytest.raises(DoesNotFitError, match=r"do not fit: they take .* in float32, of .* \(the container's") as error:
        load(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32"))
    assert error.value.hint == "try a smaller --dtype, or a smaller model"


def test_weights_that_memory_just_holds_are_loaded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * num_parameters()
    monkeypatch.setattr(load_module, "free_memory", lambda _: FreeMemory(needed, "available memory"))
    assert load(EngineConfig(model=str(tiny_llama), device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


def test_loading_writes_nothing_to_the_terminal(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(EngineConfig(model=str(tiny_llama)))
    assert capfd.readouterr() == ("", "")


def test_the_generation_config_gives_defaults_ends_and_a_warning(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    stated = {"do_sample": True, "temperature": 0.7, "eos_token_id": [2, 4], "repetition_penalty": 1.2, "num_beams": 4}
    (copy / "generation_config.json").write_text(json.dumps(stated))
    with caplog.at_level(logging.WARNING):
        loaded = load(EngineConfig(model=str(copy)))
    assert loaded.generation_defaults == {"temperature": 0.7, "repetition_penalty": 1.2}
    assert loaded.eos_token_ids == {2, 4}
    assert loaded.generation_not_taken == ("num_beams",)
    assert "num_beams" in caplog.text


def test_a_tokenizer_from_elsewhere_is_used(tiny_llama: Path, copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / name).unlink(missing_ok=True)
    loaded = load(EngineConfig(model=str(copy), tokenizer=str(tiny_llama)))
    assert loaded.tokenizer.encode("the") == load(EngineConfig(model=str(tiny_llama))).tokenizer.encode("the")
    with pytest.raises(UsageError, match="the tokenizer"):
        load(EngineConfig(model=str(copy)))


def test_missing_weights_are_named(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 weights .*layers\.1\.mlp\.up_proj"):
        load(EngineConfig(model=str(copy)))


def test_a_truncated_checkpoint_is_a_usage_error(copy: Path) -> None:
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="cannot load the weights"):
        load(EngineConfig(model=str(copy)))


def test_weights_of_another_size_are_a_usage_error(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(UsageError, match=r"the weights .* have other sizes than its config says"):
        load(EngineConfig(model=str(copy)))


@pytest.mark.parametrize("content", ["", "{", "x"])
def test_a_damaged_generation_config_is_not_passed_over(copy: Path, content: str) -> None:
    (copy / "generation_config.json").write_text(content)
    with pytest.raises(UsageError, match=r"generation_config\.json is not JSON that can be read \(mend it"):
        load(EngineConfig(model=str(copy)))


def test_without_a_generation_config_the_model_loads(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    assert load(EngineConfig(model=str(copy))).generation_defaults == {}


def test_a_folder_without_weights_is_a_usage_error(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="the weights"):
        load(EngineConfig(model=str(copy)))


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "mixtral"])
def test_other_layouts_of_weights_load_whole(family: str, tmp_path: Path) -> None:
    """Tied embeddings, fused projections, and experts that transformers converts on the way."""
    folder = build_tiny(family, tmp_path)
    assert load(EngineConfig(model=str(folder))).shape.num_layers
