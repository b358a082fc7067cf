"""What tests of runs share."""

from __future__ import annotations

import pytest

from tests.simulate.traces import Clock, stop_the_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_the_clock(monkeypatch)
