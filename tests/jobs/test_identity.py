"""Spec J1: another model never replays this one's answers; the same model elsewhere does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cbatch.config import EngineConfig
from cbatch.jobs import identity
from cbatch.jobs.identity import identify_model


def model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "model.safetensors").write_bytes(bytes(3_000_000))
    (path / "README.md").write_text("hello")
    return path


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    first = model(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("other words")
    assert identify_model(EngineConfig(model=str(first))) == identify_model(EngineConfig(model=str(tmp_path / "b")))


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize("whole", [1 << 10, 1 << 30])
def test_a_changed_file_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: int
) -> None:
    monkeypatch.setattr(identity, "WHOLE_FILE_BYTES", whole)
    config = EngineConfig(model=str(model(tmp_path / "a")))
    before = identify_model(config)
    content = bytearray((tmp_path / "a" / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / "a" / name).write_bytes(content)
    assert identify_model(config) != before


def test_arithmetic_and_tokenizer_count(tmp_path: Path) -> None:
    name = str(model(tmp_path / "a"))
    other = str(model(tmp_path / "b"))
    configs = [
        EngineConfig(model=name),
        EngineConfig(model=name, dtype="float32"),
        EngineConfig(model=name, tokenizer=other),
        EngineConfig(model=name, deterministic=True),
    ]
    assert len({identify_model(config) for config in configs}) == len(configs)


def test_settings_of_the_engine_do_not_count(tmp_path: Path) -> None:
    name = str(model(tmp_path / "a"))
    tuned = EngineConfig(model=name, page_size=64, max_batch_tokens=17, num_blocks=9, max_requests_per_batch=3)
    assert identify_model(tuned) == identify_model(EngineConfig(model=name))


def test_a_hub_repository_is_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {"main": "aaa", "dev": "bbb"}
    monkeypatch.setattr(identity, "_hub_commit", lambda name, revision: commits[revision or "main"])
    main = identify_model(EngineConfig(model="some/model"))
    assert main != identify_model(EngineConfig(model="some/model", revision="dev"))
    commits["main"] = "ccc"
    assert main != identify_model(EngineConfig(model="some/model"))


def test_offline_the_cached_commit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Offline:
        def model_info(self, *_args: object, **_options: object) -> None:
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("aaa")
    cached = identify_model(EngineConfig(model="some/model"))
    (refs / "main").write_text("bbb")
    assert identify_model(EngineConfig(model="some/model")) != cached
