"""Which implementation runs, and what a run is told of it."""

from __future__ import annotations

import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.compile import CompiledKernels
from cbatch_kernels.dispatch import AttentionChoice, choose_attention

from tests.kernels.oracle import Variant, build_case

CPU = torch.device("cpu")
BUILT = CompiledKernels(object(), "built with c++ 1.0", "AVX2")  # type: ignore[arg-type]


def test_compiled_attention_copies_no_context_and_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "load_kernels", lambda _: BUILT)
    for fixed_order in (False, True):
        choice = choose_attention(CPU, torch.float32, 64, fixed_order=fixed_order)
        assert choice == AttentionChoice("compiled for AVX2", "built with c++ 1.0", gathers=False)


@pytest.mark.usefixtures("only_references")
@pytest.mark.parametrize(
    ("fixed_order", "name"), [(False, "PyTorch reference"), (True, "PyTorch in a fixed order")], ids=str
)
def test_without_kernels_the_reference_runs_and_says_why(fixed_order: bool, name: str) -> None:
    choice = choose_attention(CPU, torch.float32, 64, fixed_order=fixed_order)
    assert choice == AttentionChoice(name, "a test wants none", gathers=True)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("mps", torch.bfloat16, 64, "there are no kernels for mps here"),
        ("cpu", torch.float64, 64, "the compiled kernels have none for float64"),
        ("cpu", torch.float32, 20, "the compiled kernels have none for heads of 20, which is no multiple of 8"),
    ],
)
def test_what_no_kernel_takes_builds_none(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    monkeypatch.setattr(dispatch, "load_kernels", None)
    choice = choose_attention(torch.device(device), dtype, head_dim)
    assert choice == AttentionChoice("PyTorch reference", reason, gathers=True)


@pytest.mark.parametrize(
    ("fixed_order", "has_triton", "head_dim", "name", "reason"),
    [
        (False, True, 256, "Triton", "it attends over the pages where they lie"),
        (False, True, 512, "PyTorch reference", "there are no kernels for cuda here and heads of 512"),
        (True, True, 64, "PyTorch in a fixed order", "there are no kernels for cuda here"),
        (False, False, 64, "PyTorch reference", "there are no kernels for cuda here: pip install triton"),
    ],
    ids=str,
)
def test_on_a_gpu_triton_attends_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, fixed_order: bool, has_triton: bool, head_dim: int, name: str, reason: str
) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: has_triton)
    choice = choose_attention(torch.device("cuda"), torch.bfloat16, head_dim, fixed_order=fixed_order)
    assert choice == AttentionChoice(name, reason, gathers=name != "Triton")


def test_tensors_that_the_kernel_does_not_take_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "load_kernels", lambda _: BUILT)  # whose library would fail
    variant = Variant()
    case = build_case(variant, [(1, 9)])
    pages = case.key_pages.transpose(2, 3).contiguous().transpose(2, 3)
    dispatch.paged_attention(case.query, pages, case.value_pages, case.metadata, scaling=1.0)
    with pytest.raises(AttributeError):
        dispatch.paged_attention(case.query, case.key_pages, case.value_pages, case.metadata, scaling=1.0)
