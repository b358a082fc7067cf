"""Attention in a fixed order: right by the oracle, and the same bits however a sequence is cut and beside whom.

Holds of the compiled kernel too, which runs in its place where there is one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cbatch_kernels import fixed_order_attention as module
from cbatch_kernels.metadata import PagedMetadata
from torch import Tensor

from tests.kernels.oracle import TOLERANCE, Case, Variant, attend, build_case, run

pytestmark = pytest.mark.usefixtures("implementation")

ROWS = 8 * torch.get_num_threads()
LENS = [(1, 1), (1, 300), (1, 17), (5, 5), (7, 270), (30, 30)]
VARIANTS = [
    Variant(),
    Variant(page_size=1, kv_heads=4),
    Variant(page_size=64, num_heads=6, kv_heads=1, head_dim=64),
    Variant(num_heads=9, kv_heads=3, head_dim=48, page_size=12),
    Variant(sliding_window=1),
    Variant(sliding_window=270, page_size=4),
    Variant(softcap=30.0, sliding_window=5, page_size=3),
    Variant(has_sinks=True, softcap=5.0, head_dim=64),
    Variant(dtype=torch.bfloat16, has_sinks=True, sliding_window=9),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
@pytest.mark.parametrize("most", [None, 1], ids=["whole", "cut"])
def test_a_mixed_batch_equals_the_oracle(variant: Variant, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if most is not None:
        monkeypatch.setattr(module, "MAX_SCORES", most)
    case = build_case(variant, LENS, padding=3)
    result = run(case, variant, ROWS)
    num_tokens, tolerance = case.metadata.num_query_tokens, TOLERANCE[variant.dtype]
    assert result.dtype == variant.dtype
    torch.testing.assert_close(result[:num_tokens].double(), attend(case, variant), atol=tolerance, rtol=tolerance)
    assert not result[num_tokens:].any()


def part(case: Case, lens: list[tuple[int, int]], wanted: list[tuple[int, int, int]], drop: int) -> Case:
    """The same sequences with other query tokens: `wanted` are (sequence, first, end) of their contexts.

    `drop` is how many pages at the start of the context each one no longer has, as with a window.
    """
    starts = np.cumsum([0, *(num_queries for num_queries, _ in lens)])
    queries, page_size = [], case.key_pages.shape[2]
    for sequence, first, end in wanted:
        num_queries, context = lens[sequence]
        at = starts[sequence] + num_queries - context
        queries.append(case.query[at + first : at + end])
    rows = [sequence for sequence, _, _ in wanted]
    ends = np.array([end for _, _, end in wanted], dtype=np.int32)
    lengths = np.array([end - first for _, first, end in wanted], dtype=np.int32)
    dropped = np.full(len(wanted), drop * page_size, dtype=np.int32)
    tables = case.metadata.block_tables[rows][:, drop:]
    metadata = PagedMetadata.build(lengths, ends - dropped, tables, dropped)
    return Case(torch.cat(queries), case.key_pages, case.value_pages, metadata, case.sinks)


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_bits_do_not_depend_on_chunks_and_neighbours(variant: Variant) -> None:
    lens = [(600, 600), (90, 90), (290, 290)]
    case = build_case(variant, lens)
    whole = run(case, variant, ROWS)
    window, page_size = variant.sliding_window, variant.page_size

    def expected(sequence: int, first: int, end: int) -> Tensor:
        at = sum(num_queries for num_queries, _ in lens[:sequence])
        return whole[at + first : at + end]

    for wanted in (
        [(0, 599, 600)],
        [(1, 40, 41), (0, 255, 256), (2, 256, 257), (0, 0, 200)],
        [(2, 289, 290), (1, 0, 90), (0, 100, 357)],
        [(0, 400, 600), (2, 3, 5)],
    ):
        least = min(first for _, first, _ in wanted)
        drops = [0] if window is None else {0, max(0, least - window + 1) // page_size}
        for drop in drops:
            result = run(part(case, lens, wanted, drop), variant, ROWS)
            assert torch.equal(result, torch.cat([expected(*span) for span in wanted])), (wanted, drop)


@pytest.mark.parametrize("variant", [Variant(), Variant(num_heads=9, kv_heads=3, page_size=8), VARIANTS[-2]], ids=repr)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_depend_neither_on_who_shares_pages_nor_on_threads(
    implementation: str, variant: Variant, num_threads: int
) -> None:
    lens = [(1, 200), (1, 150), (1, 149), (1, 90), (1, 200), (1, 70), (30, 160)]
    case = build_case(variant, lens, shared_pages=64 // variant.page_size)
    before = torch.get_num_threads()
    together = run(case, variant, ROWS)
    if implementation == "compiled":  # the reference needs more rows for more threads
        torch.set_num_threads(num_threads)
    try:
        assert torch.equal(run(case, variant, ROWS), together)
        first = 0
        for sequence, (num_queries, context) in enumerate(lens):
            alone = part(case, lens, [(sequence, context - num_queries, context)], 0)
            assert torch.equal(run(alone, variant, ROWS), together[first : first + num_queries])
            first += num_queries
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(num_heads=3, kv_heads=1),
        Variant(kv_heads=1, sliding_window=700, page_size=20),
        Variant(kv_heads=1, has_sinks=True, softcap=9.0, dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_long_contexts_that_threads_share_equal_the_oracle_and_themselves(
    implementation: str, variant: Variant
) -> None:
    case = build_case(variant, [(1, 1500), (1, 513), (1, 40), (4, 1100)])
    before, tolerance = torch.get_num_threads(), TOLERANCE[variant.dtype]
    results = []
    for num_threads in (before, 1, 4) if implementation == "compiled" else (before,):
        torch.set_num_threads(num_threads)
        results.append(run(case, variant, ROWS))
    torch.set_num_threads(before)
    torch.testing.assert_close(results[0].double(), attend(case, variant), atol=tolerance, rtol=tolerance)
    assert all(torch.equal(result, results[0]) for result in results)
