"""Device, number type and threads: the choice and the reason that the report gives for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from cbatch.errors import UsageError
from cbatch.models import machine
from cbatch.models.machine import choose_device, choose_dtype, choose_num_threads, has_fast_bfloat16

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 CPUs without control groups, Slurm or OMP_NUM_THREADS; its files are under the folder given."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, CUDA), (False, CPU)])
def test_the_device_is_a_gpu_where_there_is_one(
    has_cuda: bool, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device("auto").value == expected
    assert choose_device("cpu").value == CPU


def test_a_gpu_asked_for_and_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA device") as raised:
        choose_device("cuda")
    assert "--device cpu" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("checkpoint", "fast", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float32),
        ("float32", True, torch.float32),
        (None, True, torch.float32),
    ],
)
def test_a_cpu_gets_the_checkpoints_type_only_where_it_is_fast(
    checkpoint: str | None, fast: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_fast_bfloat16", lambda: fast)
    choice = choose_dtype("auto", checkpoint, CPU)
    assert choice.value == expected
    assert (checkpoint or "not stated") in choice.reason or "the checkpoint's, and" in choice.reason


@pytest.mark.parametrize(
    ("checkpoint", "supported", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float16),
        ("float16", True, torch.float16),
        ("float32", True, torch.float32),
        ("float8_e4m3fn", True, torch.bfloat16),
    ],
)
def test_a_gpu_gets_the_checkpoints_type(
    checkpoint: str, supported: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert choose_dtype("auto", checkpoint, CUDA).value == expected


def test_a_type_that_is_given_is_taken() -> None:
    assert choose_dtype("float16", "float32", CPU).value == torch.float16
    assert choose_dtype("float16", "float32", CPU).reason == "given"


@pytest.mark.parametrize(
    ("cpu_info", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 sse\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("flags : fpu avx512f avx2\n", False),
        ("Features : fp asimd bf16\n", True),
        ("Features : fp asimd\n", False),
        ("", False),
        (None, False),
    ],
)
def test_fast_bfloat16_is_read_from_the_cpus_flags(cpu_info: str | None, expected: bool, bare_machine: Path) -> None:
    if cpu_info is not None:
        write(bare_machine / "cpuinfo", cpu_info)
    assert has_fast_bfloat16() == expected


def test_all_cpus_of_the_process_compute(bare_machine: Path) -> None:
    choice = choose_num_threads()
    assert (choice.value, "may run on" in choice.reason) == (16, True)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"cgroup/cpu.max": "max 100000\n"}, 16),
        ({"own": "0::/pod/box\n", "cgroup/pod/cpu.max": "400000 100000", "cgroup/pod/box/cpu.max": "max 100000"}, 4),
        ({"cgroup/cpu/cpu.cfs_quota_us": "300000", "cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"}, 16),
        (
            {
                "own": "5:memory:/x\n4:cpu,cpuacct:/job\n",
                "cgroup/cpu/job/cpu.cfs_quota_us": "200000",
                "cgroup/cpu/job/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({"cgroup/cpu.max": "nonsense\n"}, 16),
    ],
)
def test_the_containers_quota_is_respected(files: dict[str, str], expected: int, bare_machine: Path) -> None:
    for name, text in files.items():
        write(bare_machine / name, text)
    choice = choose_num_threads()
    assert choice.value == expected
    assert ("quota" in choice.reason) == (expected < 16)


def test_slurms_share_is_respected(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    assert (choose_num_threads().value, choose_num_threads().reason) == (5, "SLURM_CPUS_PER_TASK")
    write(bare_machine / "cgroup/cpu.max", "300000 100000")
    assert choose_num_threads().value == 3


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("6,2", 6), ("", 16), ("0", 16), ("many", 16), ("40", 40)])
def test_omp_num_threads_wins_where_it_is_a_number(
    given: str, expected: int, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert choose_num_threads().value == expected


def test_one_thread_where_more_could_run_is_warned_about(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with caplog.at_level(logging.WARNING):
        assert choose_num_threads().value == 1
    assert "15 of 16 CPUs unused" in caplog.text
    caplog.clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert choose_num_threads().value == 1
    assert not caplog.text
