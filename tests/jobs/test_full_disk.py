"""Spec J1: a disk that fills up, for real: a small file system in memory, mounted for the test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch.errors import OutputError
from tests.jobs.jobkit import Bench, prompts

ROWS = 400


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="mount is a POSIX command")
@pytest.mark.parametrize("size", ["size=2m", "size=320k"], ids=["room for all", "room for the journal only"])
def test_a_full_disk_costs_no_finished_row(tmp_path: Path, small_disk: Path, size: str) -> None:
    bench = Bench(tmp_path)
    bench.write(prompts(ROWS))
    output = small_disk / "out.jsonl"
    with pytest.raises(OutputError, match="No space left"):
        bench.run(output=str(output))
    assert not output.exists()
    num_before = bench.num_prompts_run
    assert 0 < num_before < ROWS
    subprocess.run(["mount", "-o", f"remount,{size}", str(small_disk)], check=True)
    if size == "size=320k":
        with pytest.raises(OutputError, match="No space left"):
            bench.run(output=str(output))
        assert not output.exists()
        assert bench.num_prompts_run >= ROWS
        subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    summary = bench.run(output=str(output))
    assert (summary.status, summary.rows_ok, summary.rows_replayed > 0) == ("done", ROWS, True)
    assert [path.name for path in small_disk.iterdir() if "lock" in path.name or "partial" in path.name] == []
