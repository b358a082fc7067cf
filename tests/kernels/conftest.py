"""Uninitialised memory is full of NaN in every test of a kernel, so that nothing unwritten goes unseen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_filled_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
