"""Memory in huge pages, where Linux has them: with pages of 4 KiB each piece of a few KiB costs a walk through the page
tables, and memory is not fetched ahead past a page's end.

Called by the runner for the cache, which attention reads in any order, and for packed weights, whose panels go by. On
other systems nothing happens.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21  # of x86 and most ARM systems
SLAB_BYTES = 32 * HUGE_PAGE_BYTES  # more than allocators keep for later: of a slab only what is written takes memory
ALIGNMENT = 64


def advise_huge_pages(tensor: Tensor) -> None:
    """Advise the whole huge pages within a tensor that nothing was written to yet; a best effort."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


class HugeSlabs:
    """Tensors one behind the other in slabs of huge pages, which most are too small to fill; for those of one life."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor that is not initialised. Its slab stays as long as any of its tensors does."""
        size, start = math.prod(shape) * dtype.itemsize, -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + size > len(self._slab):
            start, self._slab = 0, torch.empty(max(size, SLAB_BYTES), dtype=torch.uint8)
            advise_huge_pages(self._slab)
        self._used = start + size
        return self._slab[start : self._used].view(dtype).view(shape)
