"""The cache's memory is marked for huge pages, where the system has them, and is as it was otherwise."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from cbatch.engine.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages

MAPS = Path("/proc/self/smaps")
SUPPORT = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> list[str]:
    """Read the flags of the mapping that holds an address."""
    inside = False
    for line in MAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError


@pytest.mark.skipif(not SUPPORT.exists(), reason="this system has no huge pages")
def test_whole_huge_pages_of_a_large_tensor_are_advised() -> None:
    # A mapping of its own: the allocator may give memory back that an earlier test has had advised.
    tensor = torch.frombuffer(mmap.mmap(-1, 5 * HUGE_PAGE_BYTES), dtype=torch.uint8)
    middle = tensor.data_ptr() + 2 * HUGE_PAGE_BYTES
    assert "hg" not in flags_at(middle)
    advise_huge_pages(tensor)
    assert "hg" in flags_at(middle)
    assert tensor.fill_(7).sum() == 7 * tensor.numel()


def test_where_there_are_none_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    advise_huge_pages(torch.ones(10))
    advise_huge_pages(torch.empty(0))
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = torch.ones(2 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    advise_huge_pages(tensor)
    assert tensor.all()
