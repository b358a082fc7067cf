"""What is said of a model without its weights is what transformers says of it once they are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cbatch.config import EngineConfig
from cbatch.models.generation import end_token_ids, generation_defaults
from cbatch.models.inspect import inspect_model
from cbatch.models.load import load_model
from cbatch.models.outline import outline_model
from tests.tiny_models import build_tiny

STATED = '{"do_sample": true, "temperature": 0.7, "top_k": 5, "typical_p": 0.9, "eos_token_id": [2, 7]}'


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize("generation_config", ["the model's", "stated", "none"])
def test_it_is_that_of_the_loaded_model(family: str, generation_config: str, tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path)
    file = folder / "generation_config.json"
    if generation_config != "the model's":
        file.unlink()
    if generation_config == "stated":
        file.write_text(STATED)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = EngineConfig(model=str(folder))
    outline = outline_model(config, inspect_model(config))
    defaults = generation_defaults(model.generation_config)
    assert (outline.generation_defaults, outline.generation_not_taken) == (defaults.sampling, defaults.not_taken)
    assert outline.eos_token_ids >= end_token_ids(model.generation_config, model.config)
    assert outline.eos_token_ids == ({2, 7} if generation_config == "stated" else {2})
    assert outline.generation_defaults == ({"temperature": 0.7, "top_k": 5} if generation_config == "stated" else {})


def test_a_loaded_model_says_the_same(tmp_path: Path) -> None:
    config = EngineConfig(model=str(build_tiny("llama", tmp_path)))
    shape = inspect_model(config)
    outline, loaded = outline_model(config, shape), load_model(config, shape)
    assert loaded.patched == outline.patched
    assert loaded.in_one_call == outline.in_one_call
    assert (loaded.shape, loaded.dtype, loaded.num_threads) == (outline.shape, outline.dtype, outline.num_threads)
    assert loaded.dtype is torch.float32
    assert outline.num_choosable == loaded.num_choosable
