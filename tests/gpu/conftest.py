"""What the tests on a GPU share. They import the engine and the kernels only, so that they run wherever those do:

python -m pytest tests/gpu
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark every test here, and skip it where there is no GPU."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skipped)
