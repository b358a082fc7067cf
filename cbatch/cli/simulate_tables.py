"""How a simulation looks in a terminal: a table of all cases, and what a job over several GPUs takes.

Used by `simulate`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from cbatch.cli.text_table import text_table
from cbatch.simulate.comparison import Case, Comparison
from cbatch.simulate.figures import Figures
from cbatch.simulate.shards import ShardedPlan
from cbatch.units import format_seconds

Column = tuple[str, Callable[[Figures], str]]

COLUMNS: tuple[Column, ...] = (
    ("time", lambda f: format_seconds(f.duration_s)),
    ("tokens/s", lambda f: f"{f.output_tokens_per_s:,.0f}"),
    ("TTFT mean", lambda f: format_seconds(f.ttft_mean_s)),
    ("TTFT P99", lambda f: format_seconds(f.ttft_p99_s)),
    ("ITL mean", lambda f: format_seconds(f.itl_mean_s)),
    ("ITL P99", lambda f: format_seconds(f.itl_p99_s)),
    ("running", lambda f: f"{f.mean_running:.1f}"),
    ("cache", lambda f: f"{f.mean_cache_usage:.0%}"),
    ("preempted", lambda f: str(f.preemptions)),
)
GOODPUT: Column = ("goodput tokens/s", lambda f: f"{f.goodput_tokens_per_s or 0.0:,.0f}")
CACHED: Column = ("reused", lambda f: f"{f.cached_tokens / f.prompt_tokens:.0%}" if f.prompt_tokens else "0%")


def show_comparison(comparison: Comparison, results: Sequence[tuple[Case, Figures]]) -> None:
    """Print the figures of all cases, and how near the prediction is where that is known."""
    config = comparison.config
    columns = list(COLUMNS)
    columns += [GOODPUT] if config.goodput_ttft is not None or config.goodput_itl is not None else []
    columns += [CACHED] if comparison.workload.shares else []
    rows = [[case.name, *(show(figures) for _, show in columns)] for case, figures in results]
    _print(text_table(["", *(title for title, _ in columns)], rows))
    refused = max(figures.refused for _, figures in results)
    if refused:
        _print(f"{refused} requests are left out: they can never fit")
    predicted = next((figures.duration_s for case, figures in results if case.is_as_run), None)
    if comparison.measured_s is not None and predicted is not None:
        difference = predicted / comparison.measured_s - 1
        _print(
            f"the run took {format_seconds(comparison.measured_s)} of generation, "
            f"simulated {format_seconds(predicted)} ({difference:+.1%})"
        )


def show_shards(plan: ShardedPlan) -> None:
    """Print what a job over several GPUs takes."""
    times = [shard.duration_s for shard in plan.shards]
    loading = (
        "loading left out" if plan.load_s is None else f"{format_seconds(plan.load_s)} of loading included in each"
    )
    _print(
        f"{len(plan.shards)} GPUs: {format_seconds(plan.duration_s)}, {plan.gpu_hours:.4g} GPU-hours, {loading}; "
        f"{plan.output_tokens_per_s:,.0f} tokens/s; "
        f"shards generate for {format_seconds(min(times))} to {format_seconds(max(times))}"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
