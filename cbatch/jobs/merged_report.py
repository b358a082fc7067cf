"""The report of a merged output, from those of its parts. Called by `merge`.

Counts and times are sums over the parts, whether these ran one after the other or side by side. Leaves out percentiles,
which the parts' own reports have: they do not add up.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from cbatch.errors import InputError
from cbatch.jobs.keys import hash_text
from cbatch.jobs.paths import report_path
from cbatch.jobs.report import read_report

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
SHARED = ("inputs", "model", "sampling", "seeds", "settings", "versions")


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
        "latency": {name: _latency([report["latency"][name] for report in reports]) for name in reports[0]["latency"]},
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


def _latency(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Count, mean and maximum of a latency over all parts."""
    some = [part for part in parts if part["count"]]
    count = sum(part["count"] for part in some)
    if not some:
        return {"count": 0}
    mean = sum(part["mean"] * part["count"] for part in some) / count
    return {"count": count, "mean": mean, "max": max(part["max"] for part in some)}


def _hash(hashes: list[str]) -> str:
    """One for all: the parts' own where they agree, else a hash of theirs in their order."""
    return hashes[0] if len(set(hashes)) == 1 else hash_text(" ".join(hashes)).hex()
