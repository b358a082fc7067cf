"""The kernels as this machine and as others build them: vectors of four and of sixteen floats, no instructions by name.

Sixteen are what AVX-512 has: twice the registers, and a half vector left over at the end of some heads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from cbatch_kernels import compile as module
from cbatch_kernels import dispatch
from cbatch_kernels.compile import CompiledKernels
from cbatch_kernels.dispatch import cache_write, paged_attention, rms_norm, rope_cache_write
from cbatch_kernels.huge_pages import HugeSlabs
from cbatch_kernels.packed_linear import linear_packed, pack_weight, unpack
from cbatch_kernels.rms_norm import rms_norm_ref
from cbatch_kernels.rope_cache_write import rope_ref

from tests.kernels.oracle import TOLERANCE, Variant, attend, build_case, run

LENS = [(1, 1), (1, 70), (1, 64), (1, 40), (9, 75), (40, 40)]
VARIANTS = [
    Variant(num_heads=14, kv_heads=2, head_dim=72, page_size=5, has_sinks=True),
    Variant(num_heads=5, kv_heads=1, head_dim=40, sliding_window=9, softcap=5.0),
    Variant(num_heads=2, kv_heads=2, head_dim=80, dtype=torch.bfloat16),
    Variant(num_heads=6, kv_heads=1, head_dim=64, dtype=torch.float16),
]


Load = Callable[[torch.dtype], CompiledKernels]


@pytest.fixture(scope="module", params=["native", 4, 16])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Those of this machine, or ones built without optimisation for this module alone."""
    if request.param == "native":
        yield module.load_kernels
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FLAGS", (*module.FLAGS, "-O0", "-Wno-psabi", f"-DCBATCH_WIDTH={request.param}"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield cache(module.load_kernels.__wrapped__)


@pytest.fixture(autouse=True)
def use(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    if (kernels := load(torch.float32)).library is None:
        pytest.fail(kernels.reason) if "CI" in os.environ else pytest.skip(kernels.reason)
    monkeypatch.setattr(dispatch, "load_kernels", load)


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_attention_equals_the_oracle(variant: Variant) -> None:
    case = build_case(variant, LENS)
    result = run(case, variant)
    tolerance = TOLERANCE[variant.dtype]
    torch.testing.assert_close(result.double(), attend(case, variant), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_widened_exactly_and_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """Every number of the type as the only value of a context, which attention gives back as it is."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    every = every[every.isfinite()]
    padded = torch.cat((every, torch.zeros(-len(every) % 64, dtype=dtype))).view(-1, 1, 1, 64)
    for part in padded.split(64):
        case = build_case(Variant(num_heads=1, kv_heads=1, head_dim=64, dtype=dtype), [(1, 1)] * len(part))
        table = case.metadata.block_tables[:, 0].long()
        case.value_pages[table, 0, 0] = part[:, 0, 0]
        result = paged_attention(case.query, case.key_pages, case.value_pages, case.metadata, scaling=1.0)
        assert torch.equal(result, part[:, 0])


def test_rounding_is_that_of_pytorch() -> None:
    """Averages of two values lie between two numbers of the type, or exactly in the middle."""
    for dtype in (torch.bfloat16, torch.float16):
        case = build_case(Variant(num_heads=1, kv_heads=1, head_dim=64, dtype=dtype), [(1, 2)] * 50)
        table = case.metadata.block_tables[:, 0].long()
        values = (torch.randn(50, 2, 64) * torch.logspace(-9, 3, 50)[:, None, None]).to(dtype)
        case.value_pages[table, 0, :2] = values
        result = paged_attention(case.query * 0, case.key_pages, case.value_pages, case.metadata, scaling=1.0)
        assert torch.equal(result[:, 0], values.float().mean(1).to(dtype))


def test_the_other_kernels_equal_their_references() -> None:
    x, weight = torch.randn(7, 72), torch.randn(72)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), atol=1e-6, rtol=1e-6)
    heads, angles, pages = torch.randn(5, 3, 40), torch.randn(5, 40), torch.zeros(2, 1, 4, 40)
    expected = heads.clone()
    rope_ref(expected[:, :2], angles.cos(), angles.sin())
    query, key, value = heads.split(1, dim=1)
    rope_cache_write(query, key, value, angles.cos(), angles.sin(), pages, pages.clone(), torch.arange(5))
    torch.testing.assert_close(query, expected[:, :1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(pages.flatten(0, 2)[:5], expected[:, 1], atol=1e-6, rtol=1e-6)
    pages = torch.zeros(2, 3, 4, 40)
    cache_write(heads, heads, pages, pages.clone(), torch.tensor([5, 0, 3, 7, 1]))
    assert torch.equal(pages[1, :, 1], heads[0])


@pytest.mark.parametrize("is_narrow", [False, True])
def test_products_equal_exact_ones(load: Load, is_narrow: bool) -> None:
    library = load(torch.float32).library
    assert library is not None
    weight = torch.randn(77, 40)
    weight = weight.bfloat16().float() if is_narrow else weight
    layer = pack_weight(library, HugeSlabs(), weight, None)
    assert layer.panels.dtype == (torch.bfloat16 if is_narrow else torch.float32)
    assert torch.equal(unpack(layer)[0][0], weight)
    for rows in (1, 5, 31, 110):  # parts of a tile, and more than a block of them
        x = torch.randn(rows, 40)
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(linear_packed(library, x, layer).double(), expected, rtol=1e-5, atol=2e-5)
