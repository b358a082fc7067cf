"""Spec I1, issue-sized: what a job keeps in memory is at most 32 bytes a row, fresh and resumed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.jobkit import Bench

BYTES_PER_ROW = 32
FEW, MANY = 2_000, 18_000


@pytest.fixture(autouse=True)
def _short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no queue's luck hide or fake a growth."""
    monkeypatch.setattr("cbatch.jobs.writer.MAX_QUEUED", 8)


def rows(count: int) -> Iterator[str]:
    """Rows long enough that the few fill every buffer of a fixed size."""
    note = "x" * 1000
    return (f'{{"prompt": "p{number}", "max_tokens": 1, "note": "{note}"}}' for number in range(count))


def peak_bytes(bench: Bench, count: int) -> int:
    tracemalloc.start()
    summary = bench.run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (summary.status, summary.rows, summary.rows_ok) == ("done", count, count)
    return peak


def test_memory_grows_by_at_most_32_bytes_a_row(tmp_path: Path) -> None:
    peaks: dict[tuple[str, int], int] = {}
    for count in (50, FEW, MANY):  # the first run imports what is imported late
        folder = tmp_path / str(count)
        folder.mkdir()
        bench = Bench(folder)
        bench.write(rows(count))
        peaks["fresh", count] = peak_bytes(bench, count)
        bench.output.unlink()
        peaks["resumed", count] = peak_bytes(bench, count)
    for kind in ("fresh", "resumed"):
        growth = (peaks[kind, MANY] - peaks[kind, FEW]) / (MANY - FEW)
        assert growth <= BYTES_PER_ROW, f"{kind}: {growth:.1f} bytes a row"
