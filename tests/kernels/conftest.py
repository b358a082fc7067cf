"""Uninitialised memory is full of NaN in every test of a kernel, so that nothing unwritten goes unseen."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.compile import CompiledKernels, load_kernels


@pytest.fixture(autouse=True)
def nan_filled_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def only_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(dispatch, "load_kernels", lambda _: CompiledKernels(None, "a test wants none"))


@pytest.fixture(params=["reference", "compiled", "interpreted"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Run the test with each; what no kernel takes runs the reference again."""
    name: str = request.param
    if name == "interpreted":
        request.getfixturevalue("interpreted")
    elif name == "reference":
        request.getfixturevalue("only_references")
    elif load_kernels(torch.float32).library is None:
        reason = load_kernels(torch.float32).reason
        pytest.fail(reason) if "CI" in os.environ else pytest.skip(reason)
    return name
