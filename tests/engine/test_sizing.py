"""What memory is there, what each consumer takes of it, and what a run then really takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import lcm
from pathlib import Path

import psutil
import pytest
import torch

from cbatch.engine.cache.build import build_cache, group_layers
from cbatch.engine.sizing import block_bytes, cache_bytes, longest_context, page_bytes, step_footprint
from cbatch.models import machine, memory
from cbatch.models.inspect import ModelShape
from cbatch.models.memory import FreeMemory, free_memory
from cbatch.units import GIB
from tests.conftest import ROOT
from tests.engine.measure_memory import CLEAR_REFS
from tests.tiny_models import build_tiny_model, build_tiny_tokenizer

CPU = torch.device("cpu")


def make_shape(**changes: object) -> ModelShape:
    """SmolLM2-135M's, changed."""
    values = {
        "model_type": "llama",
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "context_length": 8192,
        "layer_types": ("full_attention",) * 30,
        "sliding_windows": (None,) * 30,
        "checkpoint_dtype": "bfloat16",
    }
    return ModelShape(**(values | changes))  # type: ignore[arg-type]


# What is there


@pytest.fixture
def fake_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available, no mapped weights and no limits, whose control groups are in the folder."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GIB}))
    return tmp_path


def limit_group(folder: Path, limit: object, usage: int, *, inactive_file: int = 0, version: int = 2) -> None:
    names = memory.CGROUP_FILES[2 - version]
    prefix = "" if version == 2 else "total_"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 17\n{prefix}inactive_file {inactive_file}\n")


def test_without_limits_what_is_available_is_free(fake_machine: Path) -> None:
    assert free_memory(CPU) == FreeMemory(64 * GIB, "available memory")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", ["the container's own", "a job's below it"])
def test_the_limit_of_the_control_group_counts(fake_machine: Path, version: int, place: str) -> None:
    root = fake_machine / "cgroup" / ("" if version == 2 else "memory")
    group = root if place == "the container's own" else root / "slurm" / "job_7"
    if group != root:
        (fake_machine / "own").write_text("0::/slurm/job_7\n" if version == 2 else "4:memory:/slurm/job_7\n")
    limit_group(group, 8 * GIB, 3 * GIB, inactive_file=GIB, version=version)
    assert free_memory(CPU) == FreeMemory(6 * GIB, "the container's memory limit")


def test_the_tightest_of_nested_limits_counts(fake_machine: Path) -> None:
    (fake_machine / "own").write_text("0::/a/b\n")
    limit_group(fake_machine / "cgroup", 32 * GIB, 2 * GIB)
    limit_group(fake_machine / "cgroup" / "a", 4 * GIB, GIB)
    limit_group(fake_machine / "cgroup" / "a" / "b", "max", 0)
    assert free_memory(CPU).num_bytes == 3 * GIB


@pytest.mark.parametrize("limit", ["max", 2**63 - 4096, 100 * GIB])
def test_a_limit_that_does_not_bind_is_none(fake_machine: Path, limit: object) -> None:
    limit_group(fake_machine / "cgroup", limit, GIB)
    assert free_memory(CPU) == FreeMemory(64 * GIB, "available memory")


@pytest.mark.parametrize("content", ["", "not a number\n"])
def test_files_that_cannot_be_read_limit_nothing(fake_machine: Path, content: str) -> None:
    limit_group(fake_machine / "cgroup", 8 * GIB, GIB)
    (fake_machine / "cgroup" / "memory.max").write_text(content)
    assert free_memory(CPU).source == "available memory"


def test_more_usage_than_the_limit_leaves_nothing(fake_machine: Path) -> None:
    limit_group(fake_machine / "cgroup", 2 * GIB, 3 * GIB)
    assert free_memory(CPU).num_bytes == 0


def test_weights_that_are_mapped_are_not_free_though_the_kernel_could_drop_them(fake_machine: Path) -> None:
    start, stop = 0x7F0000000000, 0x7F0000000000 + 5 * GIB
    (fake_machine / "maps").write_text(
        f"{start:x}-{stop:x} r--p 00000000 08:01 42                 /models/model-00001-of-00002.safetensors\n"
        f"{stop:x}-{stop + GIB:x} r-xp 00000000 08:01 43            /usr/lib/libtorch.so\n"
        f"{stop + GIB:x}-{stop + 2 * GIB:x} rw-p 00000000 00:00 0\n"
    )
    assert free_memory(CPU).num_bytes == 59 * GIB
    limit_group(fake_machine / "cgroup", 20 * GIB, 10 * GIB, inactive_file=7 * GIB)
    assert free_memory(CPU).num_bytes == 12 * GIB
    limit_group(fake_machine / "cgroup", 20 * GIB, 10 * GIB, inactive_file=GIB)
    assert free_memory(CPU).num_bytes == 10 * GIB


# What each consumer takes


def test_a_page_holds_keys_and_values_of_the_kv_heads() -> None:
    shape = make_shape()
    assert page_bytes(shape, torch.bfloat16, 16) == 2 * 3 * 64 * 16 * 2
    assert block_bytes(shape, torch.float32, 16) == 30 * 2 * 3 * 64 * 16 * 4


@pytest.mark.parametrize("windows", [(None,) * 30, (512,) * 30, ((512,) * 5 + (None,)) * 5, (512, 512, None) * 10])
@pytest.mark.parametrize("num_blocks", [1, 7, 1000])
def test_the_cache_takes_what_its_pages_do(windows: tuple[int | None, ...], num_blocks: int) -> None:
    shape = make_shape(sliding_windows=windows)
    pool = build_cache(
        windows,
        num_blocks=num_blocks,
        page_size=16,
        max_batch_tokens=512,
        max_model_len=8192,
        allow_block_sharing=False,
    ).pool
    pages_per_chunk = lcm(*map(len, group_layers(windows, 8192).values()))
    taken = pool.num_chunks * pool.pages_per_chunk * page_bytes(shape, torch.float32, 16)
    assert cache_bytes(shape, torch.float32, 16, num_blocks, pages_per_chunk) == taken
    assert taken >= num_blocks * block_bytes(shape, torch.float32, 16)


def test_no_context_is_longer_than_the_cache_holds() -> None:
    shape = make_shape()
    token = block_bytes(shape, torch.float32, 1)
    assert longest_context(shape, torch.float32, 1000.5 * token, 8192) == 1000
    assert longest_context(shape, torch.float32, 10**6 * token, 8192) == 8192
    hybrid = make_shape(sliding_windows=((512,) * 5 + (None,)) * 5)
    assert longest_context(hybrid, torch.float32, 1000.5 * token, 8192) == 6003
    assert longest_context(make_shape(sliding_windows=(512,) * 30), torch.float32, token, 8192) == 8192


@pytest.mark.parametrize(
    ("more", "grows"),
    [
        ({"max_batch_tokens": 1024}, "activations"),
        ({"max_requests": 512}, "logits"),
        ({"max_context": 32768}, "attention"),
    ],
)
def test_each_limit_is_paid_for_where_it_is_used(more: dict[str, int], grows: str) -> None:
    limits = {"max_batch_tokens": 512, "max_requests": 128, "max_context": 8192, "gathers": True, "in_one_call": False}
    before = step_footprint(make_shape(), torch.float32, **limits)
    after = step_footprint(make_shape(), torch.float32, **(limits | more))
    changed = {name for name in ("activations", "attention", "logits") if getattr(before, name) != getattr(after, name)}
    assert changed == {grows}
    assert getattr(after, grows) > getattr(before, grows)
    assert after.total >= before.total


def test_attention_that_copies_nothing_takes_nothing() -> None:
    limits = {"max_batch_tokens": 512, "max_requests": 128, "max_context": 8192, "in_one_call": False}
    assert step_footprint(make_shape(), torch.float32, gathers=False, **limits).attention == 0


def test_layers_in_one_call_share_their_memory() -> None:
    limits = {"max_batch_tokens": 512, "max_requests": 128, "max_context": 8192, "gathers": False}
    one_by_one, at_once = (step_footprint(make_shape(), torch.float32, in_one_call=x, **limits) for x in (False, True))
    assert at_once.activations < one_by_one.activations


# What a run takes


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 75 million parameters, whose vocabulary of 16,000 its tokenizer has as well."""
    folder, vocab_size = tmp_path_factory.mktemp("middling"), 16_000
    model = build_tiny_model(
        "llama",
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
    )
    # Stored in another type than it runs in: weights that are only mapped would not count.
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), vocab_size)}
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of memory can be reset on Linux only")
@pytest.mark.parametrize(
    ("free_bytes", "settings", "compiler"),
    [
        (4 * GIB, {"num_blocks": 80}, {}),  # mostly weights and step
        (GIB, {"max_memory_percent": 0.6, "cpu_offload_space": 0.1}, {}),
        (4 * GIB, {"num_blocks": 80}, {"CXX": "none"}),  # the reference attends
    ],
    ids=["num_blocks", "max_memory_percent", "num_blocks-no_compiler"],
)
def test_a_run_peaks_within_a_tenth_of_what_was_planned(
    middling: Path, free_bytes: int, settings: dict[str, object], compiler: dict[str, str]
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.engine.measure_memory",
        str(middling),
        str(free_bytes),
        json.dumps(settings),
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | compiler | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    # What is free is measured when the weights are in, and how much of the heap goes back then differs.
    assert found["weights"] <= found["loaded"] < 1.3 * found["weights"]
    planned = found["loaded"] + found["cache"] + found["host"] + found["step"]
    assert found["measured"] == pytest.approx(planned, rel=0.1), found
    share = settings.get("max_memory_percent", 1.0)
    assert isinstance(share, float)
    assert found["cache"] + found["host"] + found["step"] <= share * free_bytes
    if "num_blocks" not in settings:
        assert found["cache"] + found["host"] + found["step"] > 0.95 * share * free_bytes, "memory is left unused"
