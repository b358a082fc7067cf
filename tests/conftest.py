"""What every test may use. Nothing here downloads; `make test` has fetched the small real model before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests import interpreter

ROOT = Path(__file__).parent.parent

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; without it the test is skipped, in CI it fails."""
    folder = Path(os.environ.get("CBATCH_TEST_MODEL", ROOT / ".models" / "smollm2"))
    if not (folder / "model.safetensors").is_file():
        message = f"no model in {folder}: `make test` fetches it, or python sample_jobs/fetch_model.py {folder}"
        pytest.fail(message) if "CI" in os.environ else pytest.skip(message)
    return folder


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Triton, run by its interpreter."""
    if torch.cuda.is_available():
        pytest.skip(interpreter.IS_OFF)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
