"""How much memory is free on a device, container limits respected; what it looks like when there is none.

The first is asked before weights are loaded and when the plan is made, the second of every step that fails.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cbatch.models.machine import cgroup_folders

# Limit and usage, in versions 2 and 1 of control groups.
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
MAPS = Path("/proc/self/maps")
WEIGHTS_SUFFIX = ".safetensors"
CPU_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that could be taken now, and what sets that limit."""

    num_bytes: int
    source: str


def free_memory(device: torch.device) -> FreeMemory:
    """Measure what is free on `device` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return FreeMemory(free, "free on the GPU")
    # Mapped weights lie in the page cache, which counts as available.
    num_mapped = _num_mapped_bytes()
    available = FreeMemory(max(0, psutil.virtual_memory().available - num_mapped), "available memory")
    container = _free_in_container(num_mapped)
    return container if container is not None and container.num_bytes < available.num_bytes else available


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether a forward pass failed for want of memory; torch's CPU allocator has no exception of its own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_OUT_OF_MEMORY)


def trim_heap() -> None:
    """Give back what the C heap keeps of memory that was let go of: half the weights, once they are packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _free_in_container(num_mapped: int) -> FreeMemory | None:
    """Find the tightest limit of this process's control group and those above it."""
    free = [
        num_bytes
        for folder in cgroup_folders("memory")
        for files in CGROUP_FILES
        if (num_bytes := _free_under(folder, *files, num_mapped)) is not None
    ]
    return FreeMemory(min(free), "the container's memory limit") if free else None


def _free_under(folder: Path, limit_file: str, usage_file: str, num_mapped: int) -> int | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        reclaimable = _inactive_file_bytes(folder / "memory.stat")
        # The kernel could drop the weights' pages as well, but every step reads them.
        return None if limit == "max" else max(0, int(limit) - usage + max(0, reclaimable - num_mapped))
    except (OSError, ValueError):
        return None


def _inactive_file_bytes(stat: Path) -> int:
    """Read how much of the usage is page cache that the kernel drops on demand."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _num_mapped_bytes() -> int:
    """Count the bytes of weights that are not copied into memory but mapped from their files."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return 0
    ranges = [line.split(maxsplit=1)[0].split("-") for line in lines if line.endswith(WEIGHTS_SUFFIX)]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)
