"""Patched models compute what transformers' own do, module by module of the table; what differs is refused."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from cbatch_kernels import linear as packing
from cbatch_kernels.linear import linear, linear_combine, linear_combine_ref, linear_ref, pack_linear
from torch import nn

from cbatch.config import EngineConfig
from cbatch.models import patch
from cbatch.models.fused import FusedRMSNorm
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from cbatch.models.patch import FAMILIES, PatchDiffersError, head_copy_bytes, packed_bytes, patch_refusal
from cbatch.models.projections import CompiledProduct
from cbatch.models.source import resolve_source
from cbatch.models.weights import weight_bytes
from tests.engine.measure_memory import weight_bytes as measured_bytes
from tests.tiny_models import FAMILIES as TINY
from tests.tiny_models import build_tiny, build_tiny_model

CPU = torch.device("cpu")
# family → fused modules of a tiny model with 2 to 6 layers
ONE_CALL = ("llama", "mistral", "mistral_window", "qwen2", "qwen3", "smollm3", "phi3")
WHOLE_LAYERS = (*ONE_CALL, "olmo2", "olmo3", "gemma2", "gemma3")
ATTENTION_AND_MLP = ("granite",)
ATTENTION_ONLY = ("mixtral", "qwen3_moe")
LINEARS = ("gpt_oss", "cohere2", "gpt_neox", "opt")

pytestmark = pytest.mark.skipif(
    packing.refuses_packing(torch.float32, CPU) is not None, reason="oneDNN packs no weights on this machine"
)


def load(family: str, folder: Path, **changes: object) -> LoadedModel:
    config = EngineConfig(model=str(build_tiny(family, folder, **changes)))
    return load_model(config, inspect_model(config))


def fused(loaded: LoadedModel) -> Counter[str]:
    return Counter(type(m).__name__ for m in loaded.model.modules() if type(m).__name__.startswith("Fused"))


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_loads_patched_or_says_why_not(family: str, tmp_path: Path) -> None:
    loaded = load(family, tmp_path)  # which compares the logits
    layers, counts = loaded.shape.num_layers, fused(loaded)
    plain = [m for m in loaded.model.modules() if type(m) is nn.Linear]
    if family == "gpt2":
        assert not loaded.patched
        assert not counts
        assert loaded.patched_reason == "gpt2 is not in the table of patches"
        return
    assert loaded.patched, loaded.patched_reason
    assert not plain
    assert counts["FusedLayer"] == (layers if family in WHOLE_LAYERS else 0)
    assert counts["FusedDecoder"] == loaded.in_one_call == (family in ONE_CALL)
    assert counts["FusedAttention"] == (layers if family in (*WHOLE_LAYERS, *ATTENTION_AND_MLP, *ATTENTION_ONLY) else 0)
    has_mlp = family in (*WHOLE_LAYERS, *ATTENTION_AND_MLP, "cohere2")
    assert counts["FusedMLP"] == (layers if has_mlp else 0)
    if family in LINEARS:
        assert counts["FusedLinear"] > layers


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_tied_heads(changes: dict[str, object], tmp_path: Path) -> None:
    assert load("llama", tmp_path, **changes).patched


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_a_packed_head_takes_beside_the_embedding_is_known_before(stored: str, tied: bool, tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path, tie_word_embeddings=tied)
    build_tiny_model("llama", tie_word_embeddings=tied).to(getattr(torch, stored)).save_pretrained(folder)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu")
    loaded = load_model(config, inspect_model(config))
    head = loaded.model.lm_head.layer
    if not isinstance(head, CompiledProduct):
        pytest.skip("products are not compiled here")
    assert head.layer.panels.dtype == getattr(torch, stored)
    expected = head.layer.panels.itemsize * head.shape[0] * head.shape[1] if tied else 0
    assert head_copy_bytes(loaded.shape, loaded.dtype, loaded.device) == expected
    before = weight_bytes(resolve_source(str(folder)), loaded.dtype)
    assert before is not None
    after = packed_bytes(before, loaded.shape, loaded.dtype, loaded.device)
    assert after == pytest.approx(measured_bytes(loaded.model), rel=0.03), "but for norms and padding"


def test_an_activation_that_cannot_be_fused_leaves_the_mlps(tmp_path: Path) -> None:
    loaded = load("llama", tmp_path, hidden_act="relu")
    assert loaded.patched
    assert fused(loaded)["FusedMLP"] == fused(loaded)["FusedLayer"] == fused(loaded)["FusedDecoder"] == 0
    assert fused(loaded)["FusedAttention"] == 2


def test_a_patch_that_differs_is_refused_and_the_model_runs_unpatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exact = FusedRMSNorm.forward
    monkeypatch.setattr(FusedRMSNorm, "forward", lambda self, x: exact(self, x) * 1.01)
    with caplog.at_level(logging.WARNING):
        loaded = load("llama", tmp_path)
    assert not loaded.patched
    assert "logits differ by" in loaded.patched_reason
    assert "it runs unpatched" in caplog.text
    assert not fused(loaded)


def test_a_patch_that_gives_nan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedRMSNorm, "forward", lambda self, x: x * float("nan"))
    config = EngineConfig(model=str(build_tiny("llama", tmp_path)))
    shape = inspect_model(config)
    monkeypatch.setattr("cbatch.models.load.patch_refusal", lambda *_: "not now")
    loaded = load_model(config, shape)
    with pytest.raises(PatchDiffersError):
        patch.patch_model(loaded.model, shape, CPU)


def test_what_cannot_be_patched_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patch_refusal("bloom", torch.float32, CPU) == "bloom is not in the table of patches"
    assert patch_refusal("llama", torch.float32, torch.device("mps")) == "not on mps"
    assert patch_refusal("llama", torch.float32, torch.device("cuda")) is None
    assert patch_refusal("llama", torch.float32, CPU) is None

    def refuse(*_: object) -> None:
        raise RuntimeError("no such instructions")

    monkeypatch.setattr(packing, "pack_linear", refuse)
    assert patch_refusal("llama", torch.bfloat16, CPU) == "oneDNN has no fast bfloat16 on this CPU"


def test_every_family_of_the_table_is_tried_here() -> None:
    types = {"gemma3_text" if name == "gemma3" else name for name in TINY} - {"mistral_window"}
    assert set(FAMILIES) == types - {"gpt2"}


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_equal_plain_ones(activation: packing.Activation | None, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 40, generator=generator), torch.randn(7, 40, generator=generator)
    offset = torch.randn(24, generator=generator) if bias else None
    packed = pack_linear(weight, offset)
    other = torch.randn(7, 24, generator=generator)
    torch.testing.assert_close(linear(x, packed, activation), linear_ref(x, weight, offset, activation))
    for how in ("add", "mul"):
        torch.testing.assert_close(
            linear_combine(x, packed, other.clone(), how), linear_combine_ref(x, weight, offset, other, how)
        )
    assert torch.equal(
        linear_combine(x, packed, other, "add"), linear_combine(x, packed, other, "add")
    )  # other is kept
