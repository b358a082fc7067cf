"""Paged attention against the token-by-token oracle: odd sizes, every variant, pools and outputs full of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cbatch_kernels import paged_attention as module

from tests.kernels.oracle import TOLERANCE, Case, Variant, attend, build_case, run

pytestmark = pytest.mark.usefixtures("implementation")

MIXED = [(1, 1), (1, 17), (1, 40), (1, 3), (5, 5), (7, 33), (1, 20), (19, 19)]
VARIANTS = [
    Variant(),
    Variant(page_size=1),
    Variant(page_size=4, kv_heads=4),
    Variant(page_size=64, num_heads=6, kv_heads=1, head_dim=64),
    Variant(num_heads=9, kv_heads=3, head_dim=48),
    Variant(num_heads=2, kv_heads=2, head_dim=256),
    Variant(head_dim=128, scaling=0.5),
    Variant(num_heads=5, kv_heads=1, head_dim=40),
    Variant(num_heads=14, kv_heads=2, head_dim=72, page_size=5),
    Variant(num_heads=3, kv_heads=3, head_dim=80),
    Variant(head_dim=33, scaling=0.05),
    Variant(sliding_window=1),
    Variant(sliding_window=7, page_size=4),
    Variant(sliding_window=16),
    Variant(sliding_window=1000),
    Variant(softcap=2.0),
    Variant(softcap=30.0, sliding_window=5, page_size=3),
    Variant(has_sinks=True, num_heads=8, kv_heads=2),
    Variant(has_sinks=True, sliding_window=9, page_size=8),
    Variant(has_sinks=True, softcap=5.0, head_dim=64),
    Variant(dtype=torch.bfloat16),
    Variant(dtype=torch.bfloat16, sliding_window=9, head_dim=64),
    Variant(dtype=torch.bfloat16, softcap=5.0, has_sinks=True),
    Variant(dtype=torch.float16),
    Variant(dtype=torch.float16, sliding_window=9, softcap=5.0),
]


def check(case: Case, variant: Variant) -> None:
    result = run(case, variant)
    assert result.dtype == variant.dtype
    assert result.is_contiguous()
    num_tokens = case.metadata.num_query_tokens
    tolerance = TOLERANCE[variant.dtype]
    torch.testing.assert_close(result[:num_tokens].double(), attend(case, variant), atol=tolerance, rtol=tolerance)
    assert not result[num_tokens:].any()


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_a_mixed_batch_equals_the_oracle(variant: Variant) -> None:
    check(build_case(variant, MIXED), variant)


@pytest.mark.parametrize("variant", [Variant(), Variant(sliding_window=6, softcap=3.0)], ids=repr)
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 1)],
        [(1, 16)],
        [(1, 17)],
        [(1, 9)] * 5,
        [(16, 16)],
        [(17, 17)],
        [(2, 18)],
        [(3, 40), (4, 4)],
        [(1, 1), (1, 2), (1, 64), (1, 65), (1, 130)],
    ],
    ids=repr,
)
def test_batches_of_one_kind_equal_the_oracle(lens: list[tuple[int, int]], variant: Variant) -> None:
    check(build_case(variant, lens), variant)


@pytest.mark.parametrize("variant", [Variant(), Variant(sliding_window=6), Variant(has_sinks=True)], ids=repr)
def test_tiles_and_groups_cut_anywhere_change_nothing(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_TILE", 3)
    monkeypatch.setattr(module, "MAX_GATHERED_TOKENS", 50)
    check(build_case(variant, MIXED), variant)


SHARING = [(1, 80), (1, 200), (1, 133), (1, 64), (1, 65), (1, 10), (1, 130), (1, 190), (3, 150), (40, 130)]


@pytest.mark.parametrize("num_prefixes", [1, 2])
@pytest.mark.parametrize(
    ("variant", "shared_pages"),
    [
        (Variant(), 4),
        (Variant(num_heads=3, kv_heads=1), 2),
        (Variant(page_size=64), 1),
        (Variant(page_size=5, has_sinks=True, softcap=4.0), 14),
        (Variant(dtype=torch.bfloat16, num_heads=9, kv_heads=3), 3),
    ],
    ids=repr,
)
def test_rows_that_begin_with_the_same_pages_equal_the_oracle(
    variant: Variant, shared_pages: int, num_prefixes: int
) -> None:
    check(build_case(variant, SHARING, shared_pages=shared_pages, num_prefixes=num_prefixes), variant)


def test_long_contexts_of_every_length_around_a_block_equal_the_oracle() -> None:
    variant = Variant(num_heads=2)
    check(build_case(variant, [*((1, n) for n in (63, 64, 65, 127, 128, 129)), (66, 130)]), variant)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_scores_of_any_size_are_weighed_right(softcap: float | None) -> None:
    """One key far above the others takes all; a context of equal ones shares; all of them far below zero do too."""
    variant = Variant(num_heads=1, kv_heads=1, softcap=softcap, scaling=1.0)
    case = build_case(variant, [(1, 100)])
    table, size = case.metadata.block_tables[0], variant.page_size
    for factor in (1e4, -1e4, 0.0):
        case.query[:] = factor
        for position in range(100):
            case.key_pages[table[position // size], 0, position % size] = 1.0 if position == 37 else 0.5
        result = run(case, variant)[0, 0]
        expected = attend(case, variant)[0, 0]
        torch.testing.assert_close(result.double(), expected, atol=5e-6, rtol=5e-6)
        assert result.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")  # interpreted
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    variant = Variant()
    case = build_case(variant, MIXED)
    clean = run(case, variant)
    case.query[3] = float("nan")
    case.query[10, 1] = float("inf")
    spoilt = run(case, variant)
    others = [token for token in range(case.metadata.num_query_tokens) if token not in (3, 10)]
    assert torch.equal(spoilt[others], clean[others])
    assert spoilt[3].isnan().all()
    assert spoilt[10, 1].isnan().all()


def test_padding_behind_the_batch_gives_zeros() -> None:
    variant = Variant()
    check(build_case(variant, [(1, 5), (3, 3)], padding=4), variant)


def test_pages_may_be_views_with_any_strides() -> None:
    variant = Variant(kv_heads=2, head_dim=32)
    case = build_case(variant, MIXED)
    transposed = case.key_pages.transpose(2, 3).contiguous().transpose(2, 3)
    interleaved = torch.stack((case.value_pages, case.value_pages), dim=2)[:, :, 1]
    strided = Case(case.query, transposed, interleaved, case.metadata, case.sinks)
    assert not strided.key_pages.is_contiguous()
    assert not strided.value_pages.is_contiguous()
    torch.testing.assert_close(run(strided, variant), run(case, variant), atol=1e-6, rtol=0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    variant = Variant()
    case = build_case(variant, MIXED)
    lens = list(zip(case.metadata.query_lens_host, case.metadata.context_lens_host, strict=True))
    together = run(case, variant)
    first = 0
    for row, (num_queries, context) in enumerate(lens):
        alone = Case(
            case.query[first : first + num_queries],
            case.key_pages,
            case.value_pages,
            case.metadata.build(
                np.array([num_queries]), np.array([context]), case.metadata.block_tables[row : row + 1]
            ),
            None,
        )
        torch.testing.assert_close(run(alone, variant), together[first : first + num_queries], atol=1e-6, rtol=0)
        first += int(num_queries)


def test_a_window_of_w_sees_the_last_w_keys_and_no_more() -> None:
    """Values that name their position show which keys were seen, and that all weigh the same under equal scores."""
    window, context = 4, 10
    variant = Variant(num_heads=1, kv_heads=1, sliding_window=window)
    case = build_case(variant, [(context, context)])
    zeros = torch.zeros_like(case.query)
    for position in range(context):
        page = case.metadata.block_tables[0, position // variant.page_size]
        case.value_pages[page, 0, position % variant.page_size] = position
    result = run(Case(zeros, case.key_pages, case.value_pages, case.metadata, None), variant)[:, 0, 0]
    expected = [sum(range(max(0, t - window + 1), t + 1)) / min(window, t + 1) for t in range(context)]
    torch.testing.assert_close(result, torch.tensor(expected))
