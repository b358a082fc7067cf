"""Asks Linux to back memory with huge pages: attention reads it a few KiB at a time in any order, and with pages of
4 KiB each such piece costs a walk through the page tables.

Called by the runner for the cache, where that lies in the host's memory. Elsewhere, and where the system has none,
nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

HUGE_PAGE_BYTES = 2**21  # of x86 and most ARM systems


def advise_huge_pages(tensor: Tensor) -> None:
    """Advise the whole huge pages within a tensor that nothing was written to yet; a best effort."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
