"""The kernels in Triton on a device, against the oracle and the references."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from cbatch_kernels import dispatch, shared_prefix
from cbatch_kernels.cache_write import cache_write_ref
from cbatch_kernels.gated import activate_and_multiply_ref
from cbatch_kernels.linear import Activation
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.rms_norm import rms_norm_ref
from cbatch_kernels.rope_cache_write import rope_cache_write_ref
from cbatch_kernels.shared_prefix import SharedPrefixes, find_groups
from cbatch_kernels.tuned_choices import ModelSizes

from tests.kernels.draws import ROWS, assert_drawn, make_rules
from tests.kernels.oracle import TOLERANCE, Case, Variant, attend, build_case, run

CUDA = "cuda"
MIXED = [(1, 1), (1, 17), (1, 900), (1, 3), (5, 5), (7, 33), (1, 20), (130, 300)]
SINGLE = [(1, n) for n in (1, 5, 16, 17, 64, 65, 128, 500, 1500)]
VARIANTS = [
    Variant(num_heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    for heads, kv_heads in ((32, 8), (9, 3), (7, 1), (4, 4))
    for head_dim in (64, 80, 128, 256)
    for dtype in TOLERANCE
] + [
    replace(variant, dtype=dtype)
    for variant in (
        Variant(head_dim=64, sliding_window=16),
        Variant(head_dim=128, sliding_window=200, page_size=5),
        Variant(head_dim=256, softcap=50.0),
        Variant(head_dim=64, has_sinks=True, num_heads=64, kv_heads=8),
        Variant(head_dim=64, has_sinks=True, sliding_window=128, softcap=5.0, page_size=64),
    )
    for dtype in TOLERANCE
]


def on_device(case: Case) -> Case:
    """Copy a case to the device, views as they are."""
    metadata = case.metadata
    moved = PagedMetadata.build(metadata.query_lens_host, metadata.context_lens_host, metadata.block_tables.to(CUDA))
    sinks = None if case.sinks is None else case.sinks.to(CUDA)
    return Case(case.query.to(CUDA), case.key_pages.to(CUDA), case.value_pages.to(CUDA), moved, sinks)


def test_the_kernels_are_compiled_and_not_interpreted() -> None:
    from cbatch_kernels.triton_kernels.attention import attend as kernel

    assert type(kernel).__name__ == "JITFunction"
    assert dispatch.uses_triton(torch.device(CUDA))


@pytest.mark.parametrize("lens", [MIXED, SINGLE], ids=["mixed", "single"])
@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_attention_equals_the_oracle(variant: Variant, lens: list[tuple[int, int]]) -> None:
    variant = replace(variant, scaling=variant.head_dim**-0.5)
    case = build_case(variant, lens)
    result = run(on_device(case), variant).cpu().double()
    tolerance = TOLERANCE[variant.dtype]
    torch.testing.assert_close(result, attend(case, variant), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (9, 3), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_begin_alike_equal_the_oracle(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prefixes of 640 tokens under rows of every length, and a prompt beside them."""
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 640)
    variant = Variant(
        num_heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, has_sinks=True, scaling=head_dim**-0.5
    )
    lens = [*((1, 640 + n) for n in (1, 17, 40, 64, 65, 300, 3, 128, 90, 5, 7, 33)), (20, 700)]
    case = build_case(variant, lens, shared_pages=40, num_prefixes=2)
    moved = on_device(case)
    rows = case.metadata.num_decode_rows
    groups = find_groups(case.metadata.block_tables[:rows].numpy(), case.metadata.context_lens_host[:rows], 16)
    assert len(groups) == 2
    prefixes = SharedPrefixes.build(groups, rows, 16, torch.device(CUDA))
    result = run(replace(moved, metadata=replace(moved.metadata, prefixes=prefixes)), variant).cpu().double()
    torch.testing.assert_close(result, attend(case, variant), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vocab", [100, 49152, 128256])
def test_tokens_are_drawn_from_their_numbers_share(dtype: torch.dtype, vocab: int) -> None:
    rows = ROWS * 3
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(rows), vocab, generator=generator) * 3).to(dtype)
    uniform = np.random.default_rng(vocab).random(len(rows))
    tokens = dispatch.draw_tokens(logits.to(CUDA), make_rules(rows, uniform))
    assert_drawn(tokens.cpu(), logits, rows, uniform)


def test_tiles_that_are_timed_are_kept_and_give_what_the_oracle_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cbatch_kernels import triton_tiles

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    triton_tiles.choices_for_card.cache_clear()
    dispatch.tune(torch.device(CUDA), torch.bfloat16, ModelSizes(32, 8, 128, hidden=4096, intermediate=14336))
    (file,) = (tmp_path / "cbatch").glob("triton-choices-*.json")
    assert len(json.loads(file.read_text())) == 7
    variant = Variant(num_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, scaling=128**-0.5)
    case = build_case(variant, MIXED)
    result = run(on_device(case), variant).cpu().double()
    torch.testing.assert_close(result, attend(case, variant), atol=3e-2, rtol=3e-2)
    for cached in (triton_tiles.choices_for_card, triton_tiles.tiles_for, triton_tiles.row_choice):
        cached.cache_clear()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_row_operations_equal_the_references(dtype: torch.dtype) -> None:
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for hidden in (64, 577, 4096, 8192):
        x, weight = torch.randn(300, hidden, device=CUDA).to(dtype), torch.randn(hidden, device=CUDA)
        for residual in (None, torch.randn_like(x)):
            expected = rms_norm_ref(x, weight, 1e-5, residual)
            torch.testing.assert_close(dispatch.rms_norm(x, weight, 1e-5, residual), expected, **tolerance)
    for activation in get_args(Activation):
        x = torch.randn(77, 2 * 1500, device=CUDA).to(dtype)
        expected = activate_and_multiply_ref(x, activation)
        torch.testing.assert_close(dispatch.activate_and_multiply(x, activation), expected, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (80, 32)])
def test_what_is_rotated_and_written_equals_the_reference(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    merged = torch.randn(65, 12, head_dim, device=CUDA).to(dtype)
    cos, sin = torch.randn(2, 65, rotary_dim, device=CUDA).to(dtype)
    slots = torch.randperm(160, device=CUDA)[:65]
    pools = torch.zeros(4, 10, 2, 16, head_dim, device=CUDA, dtype=dtype)
    query, key, value = merged.split((8, 2, 2), dim=1)
    expected = query.clone()
    rope_cache_write_ref(expected, key.clone(), value, cos, sin, pools[0], pools[1], slots)
    dispatch.rope_cache_write(query, key.clone(), value, cos, sin, pools[2], pools[3], slots)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(query, expected, **tolerance)
    torch.testing.assert_close(pools[2:], pools[:2], **tolerance)
    cache_write_ref(key, value, pools[0], pools[1], slots)
    dispatch.cache_write(key, value, pools[2], pools[3], slots)
    assert torch.equal(pools[2], pools[0])
    assert torch.equal(pools[3], pools[1])
