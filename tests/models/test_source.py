"""What `--model` may name, and what it says where nothing is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import huggingface_hub.constants
import pytest

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.models.inspect import inspect_model
from cbatch.models.source import TOKENIZER, ModelSource, resolve_source


def test_a_folder_with_a_config_is_a_model_whatever_else_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.gguf").touch()
    assert resolve_source(str(tmp_path)) == ModelSource(str(tmp_path))


def test_a_gguf_file_is_named_by_itself_or_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    expected = ModelSource(str(tmp_path), "a.gguf")
    assert resolve_source(str(tmp_path / "a.gguf")) == expected
    assert resolve_source(str(tmp_path)) == expected
    assert expected.arguments() == {"trust_remote_code": False, "gguf_file": "a.gguf"}


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"2 \.gguf files") as raised:
        resolve_source(str(tmp_path))
    assert "a.gguf" in (raised.value.hint or "")


def test_gguf_without_its_packages_gives_the_line_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="gguf and accelerate") as raised:
        resolve_source(str(tmp_path / "a.gguf"))
    assert raised.value.hint == 'pip install "cbatch[gguf]"'


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no/such/folder", "no model folder"),
        ("./model", "no model folder"),
        ("../model", "no model folder"),
        ("~/no-such-model", "no model folder"),
        ("a/b/c", "no model folder"),
        ("", "no model folder"),
        ("two words", "no model folder"),
        ("gone.gguf", "no file"),
    ],
)
def test_a_path_that_is_not_there_never_asks_the_hub(model: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        resolve_source(model)
    assert "--model" in (raised.value.hint or "")


def test_an_empty_folder_and_a_file_of_another_kind_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither config\.json nor a \.gguf file"):
        resolve_source(str(tmp_path))
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve_source(str(tmp_path / "prompts.jsonl"))


@pytest.mark.parametrize("name", ["", "a.gguf"])
def test_a_revision_of_what_is_no_repository_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UsageError, match=r"--revision is for hub repositories.*leave --revision out"):
        resolve_source(str(tmp_path / name), revision="v1")


def test_a_wrong_tokenizer_is_not_blamed_on_the_model(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in (str(tmp_path), str(tmp_path / "file"), "/no/such/folder", "gone.gguf"):
        with pytest.raises(UsageError) as raised:
            resolve_source(name, role=TOKENIZER)
        assert "--tokenizer" in (raised.value.hint or "")
        assert "model" not in str(raised.value)


def test_a_tokenizer_needs_no_models_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_source(str(tmp_path), role=TOKENIZER) == ModelSource(str(tmp_path))


@pytest.mark.parametrize("model", ["gpt2", "org/model-1.5b"])
def test_a_hub_name_is_left_to_the_hub_with_its_revision(model: str) -> None:
    source = resolve_source(model, revision="v1", trust_remote_code=True)
    assert source.folder is None
    assert source.arguments() == {"trust_remote_code": True, "revision": "v1"}


def test_a_hub_name_that_cannot_be_reached_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="no folder 'no-org/no-model', and as a hub repository") as raised:
        inspect_model(EngineConfig(model="no-org/no-model"))
    assert "network" in (raised.value.hint or "")
