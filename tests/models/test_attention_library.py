"""The setting `attention`: what is refused, what is compared, and that a library's attention is what then runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine import engine as engine_module
from cbatch.engine.engine import Engine
from cbatch.engine.execution import decide_execution
from cbatch.engine.plan import check_config
from cbatch.engine.request import Prompt
from cbatch.errors import UsageError
from cbatch.models.attention_library import choose_attention, open_library
from cbatch.models.load import LoadedModel
from tests.engine.tiny_engine import load_tiny, make_tokens, run
from tests.kernels import attention_stand_ins
from tests.kernels.attention_stand_ins import FLASH_ATTN, FLASHINFER
from tests.tiny_models import build_tiny

MODULES = {"flash_attn": FLASH_ATTN, "flashinfer": FLASHINFER}


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny(request.param, tmp_path_factory.mktemp(request.param)))


def config(attention: str, **settings: object) -> EngineConfig:
    return EngineConfig(model="tiny", attention=attention, **settings)  # type: ignore[arg-type]


def on_gpu(loaded: LoadedModel, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    return replace(loaded, device=torch.device("cuda"), dtype=dtype, shape=replace(loaded.shape, head_dim=head_dim))


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "why"),
    [
        ("flash_attn", 64, torch.float32, "FlashAttention takes bfloat16 and float16, not float32"),
        ("flash_attn", 260, torch.bfloat16, "FlashAttention takes no heads of 260"),
        ("flashinfer", 80, torch.bfloat16, "FlashInfer takes no heads of 80"),
    ],
)
def test_a_model_that_a_library_cannot_do_is_refused(
    loaded: LoadedModel, name: str, head_dim: int, dtype: torch.dtype, why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_attention(config(name), on_gpu(loaded, head_dim, dtype))
    assert (caught.value.message, caught.value.hint) == (why, "--attention cbatch")


def test_on_a_cpu_a_library_is_refused_and_ours_is_the_default(loaded: LoadedModel) -> None:
    for name in MODULES:
        with pytest.raises(UsageError, match="need a CUDA device"):
            check_config(config(name, device="cpu"), loaded.shape)
    assert choose_attention(config("auto"), loaded) == choose_attention(config("cbatch"), loaded)
    assert open_library(config("auto"), loaded, 16) is None


def test_a_library_that_plans_on_the_host_is_not_captured(loaded: LoadedModel) -> None:
    for name, captured in (("flash_attn", True), ("flashinfer", False)):
        model = on_gpu(loaded)
        execution, _ = decide_execution(config(name), model, choose_attention(config(name), model))
        assert execution.captured == captured


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("flash_attn", "pip install flash-attn --no-build-isolation"),
        ("flashinfer", "pip install flashinfer-python"),
    ],
)
def test_one_that_is_not_installed_says_how_to(
    loaded: LoadedModel, name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="is not installed") as caught:
        open_library(config(name), loaded, 256)
    assert caught.value.hint == hint


def test_pages_and_models_that_do_not_suit_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="multiple of 256 tokens, not 16") as caught:
        open_library(config("flash_attn"), loaded, 16)
    assert caught.value.hint == "--page-size 256, or --attention cbatch"
    model: Any = SimpleNamespace(modules=lambda: [SimpleNamespace(sinks=torch.zeros(4))])
    with pytest.raises(UsageError, match="no attention sinks"):
        open_library(config("flashinfer"), replace(loaded, model=model), 16)


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_one_that_gives_something_else_is_refused(
    loaded: LoadedModel, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = SimpleNamespace(
        flash_attn_with_kvcache=lambda *a, **k: factor * FLASH_ATTN.flash_attn_with_kvcache(*a, **k),
        flash_attn_varlen_func=FLASH_ATTN.flash_attn_varlen_func,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not give what our own attention gives"):
        open_library(config("flash_attn"), loaded, 256)


def test_one_of_another_version_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="FlashInfer cannot attend here"):
        open_library(config("flashinfer"), loaded, 16)


@pytest.mark.parametrize(("name", "page_size"), [("flash_attn", 256), ("flashinfer", 16)])
def test_the_engine_runs_over_it(
    loaded: LoadedModel, name: str, page_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[int] = []
    original = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args: [calls.append(1), original(*args)][1])
    monkeypatch.setitem(sys.modules, name, MODULES[name])
    monkeypatch.setattr(engine_module, "check_config", lambda *_: None)  # as if this were a GPU
    monkeypatch.setattr(engine_module, "choose_attention", lambda _, loaded: choose_attention(config("cbatch"), loaded))
    rows = [
        Prompt(i, make_tokens(length, seed=i), SamplingParams(max_tokens=8, ignore_eos=True))
        for i, length in enumerate((3, 30, 70))
    ]
    settings = {"num_blocks": 64, "page_size": page_size, "speculation": False}
    expected = run(Engine.over(loaded, config("cbatch", **settings)), *rows)
    engine = Engine.over(loaded, config(name, **settings))
    calls.clear()  # of the comparison
    found = run(engine, *rows)
    assert len(calls) >= engine.stats.steps * loaded.shape.num_layers
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
