"""What a model runs on: device, number type and threads, each chosen with its reason. Called by load."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from cbatch.config import Device, Dtype
from cbatch.errors import UsageError

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
# x86: AVX512-BF16 and AMX; ARM: the bf16 extension. Elsewhere bfloat16 is converted back and forth.
FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Choice(Generic[Value]):
    """A decided value and why."""

    value: Value
    reason: str


def choose_device(asked: Device) -> Choice[torch.device]:
    """Choose where the model runs. Raises UsageError where the device asked for is not there."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise UsageError("no CUDA device was found", hint="check nvidia-smi and the torch build, or use --device cpu")
    if asked != "auto":
        return Choice(torch.device(asked), "given")
    if has_cuda:
        return Choice(torch.device("cuda"), "a CUDA device is there")
    return Choice(torch.device("cpu"), "no CUDA device was found")


def choose_dtype(asked: Dtype, checkpoint: str | None, device: torch.device) -> Choice[torch.dtype]:
    """Choose the number type of weights and cache; `checkpoint` is the one that the weights are stored in."""
    if asked != "auto":
        return Choice(_dtype(asked), "given")
    stored = checkpoint or "float32"
    if device.type == "cuda":
        return _choose_cuda_dtype(stored)
    if stored == "bfloat16" and has_fast_bfloat16():
        return Choice(torch.bfloat16, "the checkpoint's, and this CPU computes in it")
    if stored == "bfloat16":
        return Choice(torch.float32, "the checkpoint's bfloat16 is slow on this CPU, which lacks AVX512-BF16 and AMX")
    if stored == "float16":
        return Choice(torch.float32, "the checkpoint's float16 is slow on a CPU")
    return Choice(torch.float32, f"the checkpoint's is {checkpoint or 'not stated'}")


def _choose_cuda_dtype(stored: str) -> Choice[torch.dtype]:
    if stored == "bfloat16" and not torch.cuda.is_bf16_supported():
        return Choice(torch.float16, "the checkpoint's bfloat16 is not supported by this GPU")
    if stored in ("bfloat16", "float16", "float32"):
        return Choice(_dtype(stored), "the checkpoint's")
    return Choice(torch.bfloat16, f"the checkpoint's is {stored}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def has_fast_bfloat16() -> bool:
    """Tell whether the CPU has instructions that multiply in bfloat16."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not FAST_BFLOAT16_FLAGS.isdisjoint(flags.split())


def choose_num_threads() -> Choice[int]:
    """Choose how many CPU threads compute: OMP_NUM_THREADS where set, else all that this process may use."""
    limits = [(_num_allowed_cpus(), "CPUs that this process may run on")]
    if (quota := _cgroup_cpus()) is not None:
        limits.append((max(1, math.floor(quota)), "the container's CPU quota"))
    if (slurm := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdigit() and int(slurm) > 0:
        limits.append((int(slurm), "SLURM_CPUS_PER_TASK"))
    available, reason = min(limits, key=lambda limit: limit[0])
    omp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not omp.isdigit() or int(omp) < 1:
        return Choice(available, reason)
    if int(omp) == 1 and available > 1:
        logger.warning(
            "OMP_NUM_THREADS=1 leaves %d of %d CPUs unused; unset it to use them all", available - 1, available
        )
    return Choice(int(omp), "OMP_NUM_THREADS")


def _num_allowed_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_cpus() -> float | None:
    """Read the CPU quota of this process's control group or of one above it, in CPUs; None where there is none."""
    quotas = []
    for folder in cgroup_folders("cpu"):
        try:
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return min(quotas, default=None)


def cgroup_folders(controller: str) -> list[Path]:
    """List the folders that may limit this process, version 2 (`0::/a/b`) and version 1 (`4:cpu:/a/b`)."""
    folders = [CGROUPS, CGROUPS / controller]
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        parts = [part for part in path.split("/") if part and part != ".."]
        folders.extend(root.joinpath(*parts[: i + 1]) for i in range(len(parts)))
    return folders
