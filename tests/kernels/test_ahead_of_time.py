"""Every kernel in Triton compiles for every kind of card and fits it: nothing spills, nothing needs too much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may have
KERNELS = {
    "attend",
    "attend_prefixes",
    "join_spans",
    "rms_norm",
    "activate_and_multiply",
    "rope_cache_write",
    "draw_tokens",
}


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_kernel_fits_a_card(architecture: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", str(architecture)],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"].partition(",")[0] for kernel in found} == KERNELS
    assert [kernel for kernel in found if kernel["stack"] > 0] == []
    assert [kernel for kernel in found if kernel["shared"] > SHARED_MEMORY[architecture]] == []
