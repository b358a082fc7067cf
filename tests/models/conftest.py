"""One saved tiny model for the tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import build_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder; copy it before changing anything in it."""
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "llama")
