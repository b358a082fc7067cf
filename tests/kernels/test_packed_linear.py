"""Our own products against float64: odd sizes, every ending, and the same bits for a row in any batch."""

from __future__ import annotations

import ctypes
from typing import get_args

import pytest
import torch
from cbatch_kernels.compile import load_kernels
from cbatch_kernels.huge_pages import HugeSlabs
from cbatch_kernels.linear import Activation
from cbatch_kernels.packed_linear import linear_packed, pack_gated, pack_weight, takes_activation, takes_packed, unpack
from torch import Tensor
from torch.nn import functional

SIZES = [(1, 1), (7, 3), (16, 33), (40, 17), (64, 100), (300, 48)]  # inputs and outputs
ROWS = (1, 2, 5, 6, 7, 13, 50, 200)
FUSED = [activation for activation in get_args(Activation) if takes_activation(activation)]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = load_kernels(torch.float32)
    if found.library is None:
        pytest.skip(found.reason)
    return found.library


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_bfloat16(weight: Tensor) -> Tensor:
    """Round to what bfloat16 holds, in float32."""
    return weight.to(torch.bfloat16).float()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_exact_ones(
    library: ctypes.CDLL, inputs: int, outputs: int, is_narrow: bool, has_bias: bool
) -> None:
    weight, bias = draw(outputs, inputs), draw(outputs, seed=1) if has_bias else None
    weight = as_bfloat16(weight) if is_narrow else weight
    layer = pack_weight(library, HugeSlabs(), weight, bias)
    assert layer.panels.dtype == (torch.bfloat16 if is_narrow else torch.float32)
    for rows in ROWS:
        x, residual = draw(rows, inputs + 3, seed=2)[:, :inputs], draw(rows, outputs + 5, seed=3)[:, 2 : outputs + 2]
        before = residual.clone()
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_close(linear_packed(library, x, layer), expected)
        assert_close(linear_packed(library, x, layer, residual), expected + residual.double())
        assert torch.equal(residual, before)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("activation", FUSED)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_pairs_equal_exact_ones(
    library: ctypes.CDLL, inputs: int, outputs: int, activation: Activation, has_bias: bool
) -> None:
    parameters = [
        (as_bfloat16(draw(outputs, inputs, seed=seed)), draw(outputs, seed=seed + 5) if has_bias else None)
        for seed in (1, 2)
    ]
    layer = pack_gated(library, HugeSlabs(), *parameters, activation)
    for rows in ROWS:
        x = draw(rows, inputs, seed=4) * 3 / inputs**0.5  # so that gates are open and shut
        gate, up = (
            x.double() @ weight.double().T + (0 if bias is None else bias.double()) for weight, bias in parameters
        )
        active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        found = linear_packed(library, x, layer)
        torch.testing.assert_close(found.double(), active * up, rtol=1e-5, atol=1e-4)


def test_a_pair_of_which_one_is_exact_in_bfloat16_is_kept_in_float32(library: ctypes.CDLL) -> None:
    narrow, wide = as_bfloat16(draw(9, 5)), draw(9, 5, seed=1)
    layer = pack_gated(library, HugeSlabs(), (narrow, None), (wide, None), "silu")
    assert layer.panels.dtype == torch.float32
    x = draw(3, 5, seed=2)
    expected = functional.silu(x.double() @ narrow.double().T) * (x.double() @ wide.double().T)
    assert_close(linear_packed(library, x, layer), expected)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_packing_keeps_every_number_to_the_bit(
    library: ctypes.CDLL, inputs: int, outputs: int, is_narrow: bool
) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 3e38])
    weight = draw(outputs, inputs)
    weight.view(-1)[: len(odd)] = odd[: weight.numel()]
    weight = as_bfloat16(weight) if is_narrow else weight
    for given in (weight, weight.T.contiguous().T):
        layer = pack_gated(library, HugeSlabs(), (given, None), (-given, None), "silu")
        assert layer.panels.dtype == (torch.bfloat16 if is_narrow or (inputs, outputs) == (1, 1) else torch.float32)
        for found, expected in zip(unpack(layer), (weight, -weight), strict=True):
            assert torch.equal(found[0].view(torch.int32), expected.view(torch.int32))


def test_a_row_gets_the_same_bits_in_any_batch(library: ctypes.CDLL) -> None:
    layer, x = pack_weight(library, HugeSlabs(), draw(77, 130), None), draw(203, 130, seed=1)
    whole = linear_packed(library, x, layer)
    for rows in range(1, 60):
        assert torch.equal(linear_packed(library, x[:rows], layer), whole[:rows])
    assert torch.equal(linear_packed(library, x[150:], layer), whole[150:])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30, -1e30])
def test_a_row_that_is_not_finite_spoils_no_other(library: ctypes.CDLL, value: float) -> None:
    gate, up = (as_bfloat16(draw(20, 12, seed=seed)) for seed in (1, 2))
    x = draw(7, 12)
    clean = linear_packed(library, x, pack_gated(library, HugeSlabs(), (gate, None), (up, None), "silu"))
    x[3, 5] = value
    spoilt = linear_packed(library, x, pack_gated(library, HugeSlabs(), (gate, None), (up, None), "silu"))
    others = [row for row in range(7) if row != 3]
    assert torch.equal(spoilt[others], clean[others])
    if value != value:
        assert spoilt[3].isnan().all()


def test_what_it_does_not_take() -> None:
    assert takes_packed(torch.zeros(2, 3))
    assert not takes_packed(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert not takes_packed(torch.zeros(3, 2).T)
    assert not takes_activation("gelu")
