"""How much memory is free on a device, container limits respected, and what it looks like when there is none.

The first is asked once, when the plan is made; the second at every step that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
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
    available = FreeMemory(psutil.virtual_memory().available, "available memory")
    container = _free_in_container()
    return container if container is not None and container.num_bytes < available.num_bytes else available


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether a forward pass failed for want of memory; torch's CPU allocator has no exception of its own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_OUT_OF_MEMORY)


def _free_in_container() -> FreeMemory | None:
    for folder, limit_file, usage_file in (
        (CGROUP_V2, "memory.max", "memory.current"),
        (CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            usage = int((folder / usage_file).read_text())
            reclaimable = _inactive_file_bytes(folder / "memory.stat")
        except (OSError, ValueError):
            continue
        if limit != "max":
            return FreeMemory(max(0, int(limit) - usage + reclaimable), "the container's memory limit")
    return None


def _inactive_file_bytes(stat: Path) -> int:
    """Read how much of the usage is page cache that the kernel drops on demand."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
