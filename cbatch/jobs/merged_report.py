"""The report of a merged output, from those of its parts. Called by `merge`.

Counts and times are sums over the parts, whether these ran one after the other or side by side. Percentiles do not add
up, but histograms do: those of latencies come from theirs, and are within a bin (26 %) of what they would be.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

from cbatch.errors import InputError
from cbatch.jobs.keys import hash_text
from cbatch.jobs.paths import report_path
from cbatch.jobs.report import read_report
from cbatch.jobs.totals import BINS_PER_DECADE, PERCENTILES

SUMMED = (
    "rows",
    "rows_ok",
    "rows_error",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "output_tokens",
    "preemptions",
    "rows_truncated",
    "truncated_tokens",
    "rows_nulled",
    "generate_s",
    "load_s",
    "wall_s",
    "steps",
    "offloads",
    "restores",
    "soft_resets",
    "out_of_memory_steps",
    "schedule_s",
)
AVERAGED = ("kv_waste_fraction", "mean_cache_usage")  # over steps
GREATEST = ("peak_rss_bytes", "max_cache_usage")
SHARED = ("inputs", "model", "sampling", "prompt", "seeds", "settings", "versions")


def merge_reports(parts: list[Path]) -> dict[str, Any]:
    """Add the reports of `parts` up. Raises InputError where one lacks a figure."""
    reports = [read_report(report_path(part)) for part in parts]
    try:
        merged = _merge(reports)
    except (KeyError, TypeError) as error:
        raise InputError(f"a report of the parts lacks {error}", hint="run all shards with one version") from error
    return merged | {"parts": [{"part": part.name} | report for part, report in zip(parts, reports, strict=True)]}


def _merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {name: sum(report[name] for report in reports) for name in SUMMED}
    errors: Counter[str] = Counter()
    for report in reports:
        errors.update(report["errors"])
    return {
        **merged,
        **{name: _mean(reports, name, "steps") for name in AVERAGED},
        **{name: max(report[name] for report in reports) for name in GREATEST},
        "output_tokens_per_s": _mean(reports, "output_tokens_per_s", "generate_s"),
        "goodput_tokens_per_s": _mean(reports, "goodput_tokens_per_s", "generate_s"),
        "errors": dict(errors),
        "first_error": next((report["first_error"] for report in reports if report["first_error"]), None),
        "latency": {
            name: merge_latencies([report["latency"][name] for report in reports]) for name in reports[0]["latency"]
        },
        **{name: reports[0][name] for name in SHARED},
        "row_column": reports[0]["row_column"],
        "hashes": {name: _hash([report["hashes"][name] for report in reports]) for name in reports[0]["hashes"]},
    }


def _mean(reports: list[dict[str, Any]], name: str, weight: str) -> float | None:
    """The mean of a figure over all parts, weighed; None where a part has none."""
    if any(report[name] is None for report in reports):
        return None
    total: float = sum(report[weight] for report in reports)
    return sum(report[name] * report[weight] for report in reports) / total if total > 0 else 0.0


def merge_latencies(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Count, mean, maximum, histogram and percentiles of a latency over all parts; as far as the parts have them."""
    some = [part for part in parts if part["count"]]
    count = sum(part["count"] for part in some)
    if not some:
        return {"count": 0}
    mean, longest = sum(part["mean"] * part["count"] for part in some) / count, max(part["max"] for part in some)
    merged = {"count": count, "mean": mean, "max": longest}
    if any("histogram" not in part for part in some):
        return merged
    histogram = _add_up([part["histogram"] for part in some])
    found = {f"p{rank}": min(longest, _percentile(histogram, rank)) for rank in PERCENTILES}
    return merged | found | {"histogram": histogram}


def _add_up(histograms: list[dict[str, Any]]) -> dict[str, Any]:
    """Add histograms up, whose bins are the same but for where they begin and end."""
    first = min(histogram["first_bin"] for histogram in histograms)
    counts = [0] * (max(histogram["first_bin"] + len(histogram["counts"]) for histogram in histograms) - first)
    for histogram in histograms:
        for index, count in enumerate(histogram["counts"], start=histogram["first_bin"] - first):
            counts[index] += count
    return {"first_bin": first, "counts": counts}


def _percentile(histogram: dict[str, Any], rank: int) -> float:
    """Find the seconds below which so many percent are, the times of a bin spread evenly over its logarithms."""
    counts: list[int] = histogram["counts"]
    wanted = sum(counts) * rank / 100
    index = next(index for index, count in enumerate(accumulate(counts)) if count and count >= wanted)
    below = sum(counts[:index])
    place: int = histogram["first_bin"] + index
    return float(10 ** ((place + (wanted - below) / counts[index]) / BINS_PER_DECADE))


def _hash(hashes: list[str]) -> str:
    """One for all: the parts' own where they agree, else a hash of theirs in their order."""
    return hashes[0] if len(set(hashes)) == 1 else hash_text(" ".join(hashes)).hex()
