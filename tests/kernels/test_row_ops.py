"""RMS norm, rotary embedding and gating against float64: odd sizes, views, NaN wherever nothing was written."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.linear import Activation
from cbatch_kernels.rms_norm import takes_compiled_rms_norm
from cbatch_kernels.rope_cache_write import takes_compiled_rope
from torch import Tensor
from torch.nn import functional

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}  # relative, and absolute near 0
DTYPES = list(TOLERANCES)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 8, 15, 16, 24, 64, 100, 576, 1031])
def test_rms_norm(implementation: str, dtype: torch.dtype, hidden: int) -> None:
    for rows in (1, 2, 33):
        x, weight = draw(rows, hidden, dtype=dtype), draw(hidden, dtype=torch.float32, seed=1)
        before = x.clone()
        wide = x.double()
        expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        found = dispatch.rms_norm(x, weight, 1e-5)
        assert found.dtype == dtype
        assert_close(found, expected)
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 16, 24, 577])
def test_rms_norm_beside_a_residual(implementation: str, dtype: torch.dtype, hidden: int) -> None:
    """The sum is rounded once, and neither of the two is changed."""
    for rows in (1, 2, 33):
        x, weight = draw(rows, hidden, dtype=dtype), draw(hidden, dtype=torch.float32, seed=1)
        residual = draw(rows, hidden, dtype=dtype, seed=2)
        before = residual.clone()
        wide = x.double()
        normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        found = dispatch.rms_norm(x, weight, 1e-5, residual)
        assert found.dtype == dtype
        assert_close(found, residual.double() + normed)
        assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_the_heads_of_a_merged_product(implementation: str, dtype: torch.dtype) -> None:
    merged = draw(5, 11, 24, dtype=dtype)
    heads, weight = merged[:, 2:7], draw(24, dtype=torch.float32, seed=1)
    found = dispatch.rms_norm(heads, weight, 1e-6)
    assert found.is_contiguous()
    assert torch.equal(found, dispatch.rms_norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_normalised_the_same_whatever_its_neighbours(dtype: torch.dtype) -> None:
    x, weight = draw(300, 577, dtype=dtype), torch.ones(577)
    whole = dispatch.rms_norm(x, weight, 1e-5)
    for rows in (1, 2, 7, 120):
        assert torch.equal(dispatch.rms_norm(x[:rows], weight, 1e-5), whole[:rows])
        beside = dispatch.rms_norm(x[:rows], weight, 1e-5, x[:rows])
        assert torch.equal(beside, dispatch.rms_norm(x, weight, 1e-5, x)[:rows])


def test_rows_of_zeros_large_and_unknown_numbers(implementation: str) -> None:
    x = torch.zeros(3, 20)
    x[1] = 1e15
    x[2, 3] = float("nan")
    found = dispatch.rms_norm(x, torch.ones(20), 1e-5)
    assert torch.equal(found[0], torch.zeros(20))
    assert torch.allclose(found[1], torch.ones(20))
    assert found[2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(2, 2), (8, 8), (24, 24), (64, 64), (80, 32), (96, 50), (128, 128)]
)
def test_heads_of_a_merged_product_are_rotated_and_written(
    implementation: str, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    """Queries in place, keys on their way into the cache; values, and dimensions beyond the rotary ones, stay."""
    num_heads, kv_heads, page_size = 3, 2, 4
    for tokens in (1, 3, 29):
        merged = draw(tokens, num_heads + 2 * kv_heads, head_dim, dtype=dtype)
        query, key, value = merged.split((num_heads, kv_heads, kv_heads), dim=1)
        cos, sin = draw(tokens, rotary_dim, dtype=dtype, seed=1), draw(tokens, rotary_dim, dtype=dtype, seed=2)
        rotated = merged.double()
        wide, half = rotated[..., :rotary_dim].clone(), rotary_dim // 2
        turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        rotated[..., :rotary_dim] = wide * cos.double()[:, None] + turned * sin.double()[:, None]
        expected = value.clone()
        pools = torch.full((2, 9, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
        slots = torch.randperm(9 * page_size, generator=torch.Generator().manual_seed(3))[:tokens]
        dispatch.rope_cache_write(query, key, value, cos, sin, pools[0], pools[1], slots)
        assert_close(query, rotated[:, :num_heads])
        assert_close(pools[0][slots // page_size, :, slots % page_size], rotated[:, num_heads : num_heads + kv_heads])
        assert torch.equal(pools[1][slots // page_size, :, slots % page_size], expected)
        assert pools.isnan().sum() == 2 * (9 * page_size - tokens) * kv_heads * head_dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 7), (2, 1030)])
def test_half_of_a_row_scales_the_other(
    implementation: str, dtype: torch.dtype, activation: Activation, tokens: int, width: int
) -> None:
    x = draw(tokens, 2 * width, dtype=dtype) * 3
    gate, factor = x.double().chunk(2, dim=-1)
    active = functional.silu(gate)
    if activation != "silu":
        active = functional.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
    found = dispatch.activate_and_multiply(x, activation)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), active * factor, rtol=TOLERANCES[dtype], atol=2 * TOLERANCES[dtype])


def test_what_the_kernels_do_not_take_runs_the_references() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    assert not takes_compiled_rms_norm(x)
    assert not takes_compiled_rms_norm(torch.ones(6, 4).T)
    assert dispatch.rms_norm(torch.ones(6, 4).T, torch.full((6,), 2.0), 0.0).eq(2.0).all()
    heads = torch.ones(2, 3, 8)
    assert takes_compiled_rope(heads, torch.ones(2, 8))
    assert not takes_compiled_rope(heads, torch.ones(2, 8, dtype=torch.float16))
    assert not takes_compiled_rope(heads.transpose(1, 2), torch.ones(2, 8))
