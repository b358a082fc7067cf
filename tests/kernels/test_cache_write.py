"""The cache write: exactly the named slots change, bit for bit."""

from __future__ import annotations

import pytest
import torch
from cbatch_kernels.dispatch import cache_write

from tests.kernels.oracle import TOLERANCE

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "kv_heads", "num_tokens"), [(16, 64, 3, 37), (1, 32, 1, 5), (7, 33, 2, 1)]
)
def test_named_slots_hold_their_token_and_all_others_are_untouched(
    dtype: torch.dtype, page_size: int, head_dim: int, kv_heads: int, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_pages = 8
    pools = torch.full((2, num_pages, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]
    # Strided as a model hands them over: [kv_heads, T, head_dim] seen as [T, kv_heads, head_dim].
    key, value = torch.randn(2, kv_heads, num_tokens, head_dim, generator=generator).to(dtype).transpose(1, 2)
    cache_write(key, value, pools[0], pools[1], slots)
    written = 0
    for slot in range(num_pages * page_size):
        found = pools[:, slot // page_size, :, slot % page_size]
        if slot in slots.tolist():
            token = slots.tolist().index(slot)
            assert torch.equal(found, torch.stack((key[token], value[token])))
            written += 1
        else:
            assert found.isnan().all()
    assert written == len(slots)


def test_tokens_of_padding_may_share_a_slot() -> None:
    pages = torch.zeros(2, 1, 4, 8)
    key = torch.randn(3, 1, 8)
    cache_write(key, key, pages, pages.clone(), torch.tensor([5, 0, 0]))
    assert torch.equal(pages[1, 0, 1], key[0, 0])


def test_pages_and_tokens_may_have_any_strides() -> None:
    """Lanes of a larger tensor, a slice of merged projections, and even heads that are not in one piece."""
    merged = torch.randn(5, 3 * 2 * 8)
    key, value = merged[:, 16:32].unflatten(1, (2, 8)), merged[:, 32:].unflatten(1, (2, 8))
    pools = torch.zeros(2, 12, 2, 4, 8)
    slots = torch.tensor([7, 0, 30, 31, 2])
    cache_write(key, value, pools[0][3:], pools[1][3:], slots)
    for pool, tokens in zip(pools, (key, value), strict=True):
        assert torch.equal(pool[3:][slots // 4, :, slots % 4], tokens)
        assert torch.count_nonzero(pool) == tokens.numel()
    scattered = torch.zeros(8, 12, 2, 4).permute(1, 2, 3, 0)
    cache_write(key, value, scattered, pools[1], slots)
    assert torch.equal(scattered[slots // 4, :, slots % 4], key)
