"""Attention in Triton, under its interpreter: contexts cut into spans, and what is launched for which batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels import triton_attention as module

from tests.kernels.oracle import TOLERANCE, Case, Variant, attend, build_case, run

pytestmark = pytest.mark.usefixtures("interpreted")

LONG = [(1, 200), (1, 3), (1, 64), (1, 65), (1, 150), (7, 90)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels that are launched, each with its grid."""
    launches: list[tuple[str, tuple[int, ...]]] = []
    original = module.launch

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        launches.append((kernel.fn.__name__, grid))
        original(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(module, "launch", launch)
    return launches


def check(case: Case, variant: Variant) -> None:
    tolerance = TOLERANCE[variant.dtype]
    torch.testing.assert_close(run(case, variant).double(), attend(case, variant), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(has_sinks=True),
        Variant(softcap=4.0, page_size=5),
        Variant(num_heads=9, kv_heads=3, head_dim=40),
    ],
    ids=repr,
)
def test_contexts_that_are_cut_into_spans_equal_the_oracle(
    variant: Variant, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[int, ...]]]
) -> None:
    monkeypatch.setattr(module, "LEAST_SPAN", 32)
    monkeypatch.setattr(module, "tiles_for", lambda *_: module.Tiles(64, 32, 8, 16))
    monkeypatch.setattr(module, "count_processors", lambda _: 64)
    check(build_case(variant, LONG), variant)
    (_, grid), (join, _), (_, prompt) = launched
    assert (grid[2] > 4, join, prompt[2]) == (True, "join_spans", 1)


def test_a_window_is_walked_at_once(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[int, ...]]]
) -> None:
    monkeypatch.setattr(module, "LEAST_SPAN", 1)
    monkeypatch.setattr(module, "tiles_for", lambda *_: module.Tiles(64, 32, 8, 16))
    variant = Variant(sliding_window=20)
    check(build_case(variant, LONG), variant)
    assert [(name, grid[2:]) for name, grid in launched] == [("attend", (1,)), ("attend", (1,))]


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_prompts_in_tiles_of_any_size_equal_the_oracle(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tiles_for", lambda *_: module.Tiles(rows, 32, 8, 64))
    variant = Variant(sliding_window=40)
    check(build_case(variant, [(70, 70), (2, 50), (33, 100), (1, 1)]), variant)


def test_a_batch_asked_for_in_a_fixed_order_does_not_come_here(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    variant = Variant()
    run(build_case(variant, LONG), variant, row_multiple=4)
    assert not launched


def test_a_run_is_told_what_attends() -> None:
    choice = dispatch.choose_attention(torch.device("cpu"), torch.float32, 64)
    assert (choice.name, choice.gathers) == ("Triton", False)
