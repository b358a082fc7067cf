"""What is said of a model without its weights is what a loaded one says of itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from cbatch.config import EngineConfig
from cbatch.models.inspect import inspect_model
from cbatch.models.load import load_model
from cbatch.models.outline import ModelOutline, outline_model
from tests.tiny_models import build_tiny

DIFFERENT = {"tokenizer", "patched_reason"}  # an object of its own each; tried or only looked up


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_it_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(build_tiny(family, tmp_path)))
    shape = inspect_model(config)
    outline, loaded = outline_model(config, shape), load_model(config, shape)
    for name in (field.name for field in fields(ModelOutline) if field.name not in DIFFERENT):
        assert getattr(outline, name) == getattr(loaded, name), name
    assert outline.num_choosable == loaded.num_choosable
    assert outline.tokenizer.encode("and then") == loaded.tokenizer.encode("and then")


@pytest.mark.parametrize("stated", [True, False])
def test_its_sampling_defaults_come_from_the_models_own_file_where_there_is_one(tmp_path: Path, stated: bool) -> None:
    folder = build_tiny("llama", tmp_path)
    file = folder / "generation_config.json"
    file.unlink()
    if stated:
        file.write_text('{"do_sample": true, "temperature": 0.7, "top_k": 5, "eos_token_id": [2, 7]}')
    config = EngineConfig(model=str(folder))
    shape = inspect_model(config)
    outline, loaded = outline_model(config, shape), load_model(config, shape)
    assert outline.generation_defaults == loaded.generation_defaults
    assert outline.eos_token_ids == loaded.eos_token_ids
    assert outline.generation_defaults == ({"temperature": 0.7, "top_k": 5} if stated else {})
