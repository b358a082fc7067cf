"""Lengths, and the worked example of what either way to allocate the cache wastes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cbatch.engine.sizing import block_bytes
from cbatch.models.inspect import ModelShape
from cbatch.planning.lengths import Lengths, contiguous_waste, distribution, paged_waste
from cbatch.units import GIB

LLAMA_70B = ModelShape(
    model_type="llama",
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=8_192,
    intermediate_size=28_672,
    vocab_size=128_256,
    context_length=8_192,
    layer_types=("full_attention",) * 80,
    sliding_windows=(None,) * 80,
    checkpoint_dtype="bfloat16",
)


def test_a_thousand_requests_of_1500_tokens_leave_four_fifths_of_reserved_contexts_idle_and_hardly_any_page() -> None:
    rng = random.Random(0)
    lengths = [min(8_192, max(1, round(rng.gauss(1_500, 600)))) for _ in range(1_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(1_500, abs=20)
    assert round(contiguous_waste(lengths, 8_192), 3) == 0.816
    assert round(paged_waste(lengths, 16), 3) == 0.005


def test_the_cache_of_a_context_follows_from_the_heads_of_keys_and_values() -> None:
    # 2 (keys and values) · 80 layers · 8 heads · 128 · 8,192 tokens · 2 bytes
    assert block_bytes(LLAMA_70B, torch.bfloat16, 8_192) == 2.5 * GIB
    assert block_bytes(LLAMA_70B, torch.float8_e4m3fn, 8_192) == 1.25 * GIB
    without_groups = replace(LLAMA_70B, num_kv_heads=64)
    assert block_bytes(without_groups, torch.bfloat16, 8_192) == 20 * GIB


@pytest.mark.parametrize(
    ("lengths", "page_size", "waste"), [([16, 32], 16, 0.0), ([1], 16, 15 / 16), ([17, 15], 16, 16 / 48), ([3], 1, 0.0)]
)
def test_a_request_wastes_what_its_last_page_has_left(lengths: list[int], page_size: int, waste: float) -> None:
    assert paged_waste(lengths, page_size) == pytest.approx(waste)


def test_a_distribution_is_exact() -> None:
    found = distribution(range(1, 101))
    assert found is not None
    assert (found.total, found.mean, found.min, found.max) == (5050, 50.5, 1, 100)
    assert (found.p10, found.p50, found.p90, found.p99) == pytest.approx((10.9, 50.5, 90.1, 99.01))
    assert distribution([]) is None


def test_prompts_and_outputs_add_up_row_by_row() -> None:
    lengths = Lengths()
    lengths.add(10, [5])
    lengths.add(1, [0])
    lengths.add(4, [2, 2, 3])
    assert (list(lengths.prompts), list(lengths.outputs)) == ([10, 1, 4], [5, 0, 7])
    assert list(lengths.requests) == [15, 1, 6, 6, 7]  # a request for each sample
