"""Memory is marked for huge pages, where the system has them, and is as it was otherwise."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from cbatch_kernels.huge_pages import ALIGNMENT, HUGE_PAGE_BYTES, SLAB_BYTES, HugeSlabs, advise_huge_pages

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


def test_tensors_lie_one_behind_the_other_in_slabs() -> None:
    slabs = HugeSlabs()
    sizes = [(3, 7), (1,), (SLAB_BYTES // 2,), (0,), (SLAB_BYTES // 4, 2), (SLAB_BYTES + 1,), (5,)]
    tensors = [slabs.empty(size, torch.bfloat16 if i % 2 else torch.float32) for i, size in enumerate(sizes)]
    for i, tensor in enumerate(tensors):
        assert tensor.shape == sizes[i]
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(i)
    for i, tensor in enumerate(tensors):
        assert (tensor == i).all()  # none lies in another
    assert tensors[1].data_ptr() - tensors[0].data_ptr() < 2 * ALIGNMENT + tensors[0].nbytes


@pytest.mark.skipif(not SUPPORT.exists(), reason="this system has no huge pages")
def test_slabs_are_advised() -> None:
    tensor = HugeSlabs().empty((3 * HUGE_PAGE_BYTES,), torch.uint8)
    assert "hg" in flags_at(tensor.data_ptr() + HUGE_PAGE_BYTES)
