"""Latencies of parts that become those of the whole: as many in each bin, and percentiles within one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cbatch.jobs.merged_report import merge_latencies
from cbatch.jobs.totals import BINS_PER_DECADE, PERCENTILES, Totals

SHORTEST_S = 1e-6  # of a bin of its own
BIN = 10 ** (1 / BINS_PER_DECADE)


def table_of(values: list[float]) -> dict[str, Any]:
    """What the report of a part says of these times to the first token."""
    totals = Totals(max(1, len(values)))
    for place, value in enumerate(values):
        totals._latencies["ttft_s"][place] = value
    totals._counts["ttft_s"] = len(values)
    return totals.percentiles()["ttft_s"]


def draw(count: int, median: float) -> list[float]:
    rng = random.Random(count)
    return [median * rng.lognormvariate(0, 1) for _ in range(count)]


@pytest.mark.parametrize(
    "parts",
    [
        [draw(400, 0.1), draw(500, 2.0)],
        [draw(300, 5.0), [], draw(1, 0.001)],
        [[3.0], [3.0]],
        [draw(200, 1e-8)],
        [[0.5] * 99, [200.0]],
    ],
)
def test_histograms_add_up_and_percentiles_come_from_them(parts: list[list[float]]) -> None:
    merged, values = merge_latencies([table_of(part) for part in parts]), [value for part in parts for value in part]
    whole = table_of(values)
    assert merged["histogram"] == whole["histogram"]
    assert (merged["count"], merged["max"]) == (whole["count"], whole["max"])
    assert merged["mean"] == pytest.approx(whole["mean"], rel=1e-6)
    for rank in PERCENTILES:
        exact = float(np.percentile(np.float32(values), rank, method="inverted_cdf"))
        assert exact / BIN < merged[f"p{rank}"] * (1 + 1e-6)
        assert merged[f"p{rank}"] < max(exact, SHORTEST_S) * BIN * (1 + 1e-6)


def test_what_a_part_lacks_is_left_out() -> None:
    older = {"count": 2, "mean": 1.0, "max": 2.0, "p50": 1.0}
    assert merge_latencies([table_of([1.0, 4.0]), older]) == {"count": 4, "mean": 1.75, "max": 4.0}
    assert merge_latencies([table_of([]), {"count": 0}]) == {"count": 0}
