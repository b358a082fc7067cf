"""The products of fused modules, of every kind: each gives what PyTorch's own modules do."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from cbatch_kernels import linear as packing
from cbatch_kernels.compile import CompiledKernels, load_kernels
from cbatch_kernels.linear import Activation
from torch import Tensor
from torch.nn import functional

from cbatch.models import projections as module
from cbatch.models.projections import (
    CompiledProjections,
    OneDnnProjections,
    Parameters,
    PlainProjections,
    Projections,
    choose_projections,
)

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 40, 24


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * INPUTS**-0.25


def parameters(seed: int, *, has_bias: bool) -> Parameters:
    return draw(OUTPUTS, INPUTS, seed=seed), draw(OUTPUTS, seed=seed + 1) if has_bias else None


@pytest.fixture(params=["compiled", "oneDNN", "plain"])
def projections(request: pytest.FixtureRequest) -> Projections:
    if request.param == "plain":
        return PlainProjections()
    if request.param == "oneDNN":
        if (refused := packing.refuses_packing(torch.float32, CPU)) is not None:
            pytest.skip(refused)
        return OneDnnProjections()
    if (kernels := load_kernels(torch.float32)).library is None:
        pytest.skip(kernels.reason)
    return CompiledProjections(kernels.library)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer(projections: Projections, has_bias: bool) -> None:
    weight, bias = parameters(1, has_bias=has_bias)
    layer = projections.project((weight, bias))
    assert (layer.shape, layer.dtype) == ((OUTPUTS, INPUTS), torch.float32)
    for shape in ((1, 7), (5,), (2, 3)):
        x, residual = draw(*shape, INPUTS, seed=3), draw(*shape, OUTPUTS, seed=4)
        expected = functional.linear(x, weight, bias)
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer.add(x, residual.clone()), expected + residual)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_pair(projections: Projections, activation: Activation, has_bias: bool) -> None:
    gate, up = parameters(1, has_bias=has_bias), parameters(5, has_bias=has_bias)
    pair = projections.gate(gate, up, activation)
    assert pair.shape[1] == INPUTS
    x = draw(1, 7, INPUTS, seed=9)
    before = functional.linear(x, *gate)
    if activation == "silu":
        active = functional.silu(before)
    else:
        active = functional.gelu(before, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
    torch.testing.assert_close(pair(x), active * functional.linear(x, *up))


def test_what_is_chosen_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_projections(torch.bfloat16, torch.device("cuda")), PlainProjections)
    assert choose_projections(torch.float32, torch.device("mps")) == "not on mps"
    if load_kernels(torch.float32).library is not None:
        assert isinstance(choose_projections(torch.float32, CPU), CompiledProjections)
    monkeypatch.setattr(module, "load_kernels", lambda _: CompiledKernels(None, "a test wants none"))
    monkeypatch.setattr(module, "refuses_packing", lambda *_: None)
    assert isinstance(choose_projections(torch.float32, CPU), OneDnnProjections)
    monkeypatch.setattr(module, "refuses_packing", lambda *_: "no fast float32")
    assert choose_projections(torch.float32, CPU) == "no fast float32"
