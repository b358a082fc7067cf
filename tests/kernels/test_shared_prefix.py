"""Rows that begin with the same pages: which groups are found, and that attending to a prefix once changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cbatch_kernels import shared_prefix as module
from cbatch_kernels.shared_prefix import SharedPrefixes, find_groups

from tests.kernels.oracle import TOLERANCE, Case, Variant, attend, build_case, run

CPU = torch.device("cpu")
PAGE = 16
# Contexts around a prefix of 64 tokens: longer, at its end, within it, and a prompt that nobody looks at.
SHARING = [(1, 80), (1, 200), (1, 133), (1, 64), (1, 65), (1, 10), (1, 130), (1, 190), (1, 97), (3, 150)]


def make_tables(prefixes: list[list[int]], width: int) -> npt.NDArray[np.int32]:
    """Rows with pages of their own behind those that they are given, in any order."""
    own = iter(np.random.default_rng(0).permutation(len(prefixes) * width) + 10_000)
    rows = [[*prefix, *(next(own) for _ in range(width - len(prefix)))] for prefix in prefixes]
    return np.array(rows, dtype=np.int32)


def found(tables: npt.NDArray[np.int32], num_pages: int | None = None) -> list[tuple[list[int], int]]:
    lens = np.full(len(tables), PAGE * (tables.shape[1] if num_pages is None else num_pages), dtype=np.int32)
    return sorted((sorted(group.rows.tolist()), group.num_pages) for group in find_groups(tables, lens, PAGE))


@pytest.fixture
def any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every two rows that share a page are worth it."""
    monkeypatch.setattr(module, "LEAST_ROWS", 2)
    monkeypatch.setattr(module, "LEAST_SAVED", 1)


def test_rows_with_one_prefix_are_one_group_wherever_they_lie() -> None:
    common = list(range(75))
    tables = make_tables([common, [], common, common, [], common, common], 90)
    assert found(tables) == [([0, 2, 3, 5, 6], 75)]


@pytest.mark.parametrize(
    ("rows", "pages", "is_worth_it"), [(4, 86, True), (4, 85, False), (3, 900, False), (257, 1, True), (256, 1, False)]
)
def test_a_group_is_worth_it_from_so_many_tokens_on(rows: int, pages: int, is_worth_it: bool) -> None:
    tables = make_tables([list(range(pages))] * rows, pages + 1)
    assert found(tables) == ([(list(range(rows)), pages)] if is_worth_it else [])


@pytest.mark.parametrize("longer", [101, 400])
def test_of_nested_prefixes_those_are_taken_that_save_most(longer: int) -> None:
    """Eight rows share 100 pages; each half of them shares some more."""
    common = list(range(100))
    halves = [[*common, *range(1000 * half, 1000 * half + longer - 100)] for half in (1, 2)]
    tables = make_tables([halves[0], halves[1]] * 4, longer + 3)
    if 2 * 3 * longer > 7 * 100:
        assert found(tables) == [([0, 2, 4, 6], longer), ([1, 3, 5, 7], longer)]
    else:
        assert found(tables) == [(list(range(8)), 100)]


@pytest.mark.usefixtures("any_group")
def test_pages_that_a_context_does_not_fill_are_not_shared() -> None:
    tables = make_tables([list(range(6))] * 3, 6)
    assert found(tables, num_pages=4) == [([0, 1, 2], 4)]
    assert found(np.full((5, 4), 7, dtype=np.int32), num_pages=0) == []


@pytest.mark.usefixtures("any_group")
def test_every_group_is_one_and_none_saves_less_than_all_of_the_rows_together() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        tree = [[]]
        for _ in range(rng.integers(1, 6)):
            parent = tree[rng.integers(len(tree))]
            at = 100 * len(tree)
            tree.append([*parent, *range(at, at + rng.integers(1, 20))])
        tables = make_tables([tree[i] for i in rng.integers(len(tree), size=rng.integers(2, 12))], 120)
        groups = found(tables)
        rows = [row for members, _ in groups for row in members]
        assert len(rows) == len(set(rows))
        for members, num_pages in groups:
            assert len(members) > 1
            assert (tables[members, :num_pages] == tables[members[0], :num_pages]).all()
        shared = (tables == tables[0]).all(axis=0).argmin()
        assert sum((len(members) - 1) * num_pages for members, num_pages in groups) >= (len(tables) - 1) * shared


@pytest.mark.usefixtures("any_group")
def test_rows_of_which_each_goes_on_where_the_last_one_ended_are_divided_all_the_same() -> None:
    tables = make_tables([list(range(row + 1)) for row in range(1500)], 1501)
    groups = found(tables)
    assert groups
    assert all((tables[rows, :pages] == tables[rows[0], :pages]).all() for rows, pages in groups)


def sharing(case: Case, variant: Variant) -> Case:
    """The case as the engine hands it over, with its groups; in memory made for more rows, as a captured step's."""
    metadata, num_rows = case.metadata, case.metadata.num_decode_rows
    tables = metadata.block_tables[:num_rows].numpy()
    groups = find_groups(tables, metadata.context_lens_host[:num_rows], variant.page_size)
    assert groups
    room = SharedPrefixes.allocate(num_rows + 9, CPU)
    room.row_lens.fill_(77)
    room.copy_(SharedPrefixes.build(groups, num_rows, variant.page_size, CPU))
    assert not room.row_lens[num_rows:].any()
    return replace(case, metadata=replace(metadata, prefixes=room.first_rows(num_rows)))


@pytest.mark.usefixtures("interpreted", "any_group")
@pytest.mark.parametrize("num_prefixes", [1, 2])
@pytest.mark.parametrize(
    ("variant", "shared_pages"),
    [
        (Variant(), 4),
        (Variant(num_heads=3, kv_heads=1, has_sinks=True), 2),
        (Variant(page_size=64, num_heads=14, head_dim=64), 1),
        (Variant(page_size=5, softcap=4.0, head_dim=40), 12),
        (Variant(dtype=torch.bfloat16, num_heads=9, kv_heads=3), 3),
        (Variant(dtype=torch.float16), 4),
    ],
    ids=repr,
)
def test_a_prefix_attended_to_once_gives_what_plain_attention_gives(
    variant: Variant, shared_pages: int, num_prefixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cbatch_kernels import triton_attention

    names: list[str] = []
    original = triton_attention.launch
    monkeypatch.setattr(triton_attention, "LEAST_SPAN", 40)
    monkeypatch.setattr(
        triton_attention,
        "launch",
        lambda kernel, *args, **constants: (names.append(kernel.fn.__name__), original(kernel, *args, **constants)),
    )
    case = sharing(build_case(variant, SHARING, shared_pages=shared_pages, num_prefixes=num_prefixes), variant)
    tolerance = TOLERANCE[variant.dtype]
    torch.testing.assert_close(run(case, variant).double(), attend(case, variant), atol=tolerance, rtol=tolerance)
    assert names == ["attend_prefixes", "attend", "join_spans", "attend"]


@pytest.mark.usefixtures("interpreted", "any_group")
def test_layers_with_a_window_leave_prefixes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from cbatch_kernels import triton_attention

    variant = Variant()
    case = sharing(build_case(variant, SHARING, shared_pages=4), variant)
    windowed = replace(variant, sliding_window=30)
    monkeypatch.setattr(triton_attention, "_launch_attend_prefixes", None)
    torch.testing.assert_close(run(case, windowed).double(), attend(case, windowed), atol=1.5e-5, rtol=1.5e-5)
