"""How a comparison looks in a terminal: a table of medians and a chart of two of its figures. Used by `bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cbatch.bench.contest import Contest, Result
from cbatch.cli.console import summary_console
from cbatch.units import MIB

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 40
PLAIN_WIDTH = 120  # of what goes into a file
NOTHING = "-"

Column = tuple[str, Callable[[Result], str]]


def show_results(results: Sequence[Result], contest: Contest) -> None:
    """Print the medians of everybody on standard output."""
    console = summary_console(sys.stdout)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    _print_table(console, results, contest)
    ran = [(result.contestant.name, result.median) for result in results]
    figures = [(name, median) for name, median in ran if median is not None]
    if len(figures) > 1:
        _print_chart(console, "output tokens/s", [(name, f.output_tokens_per_s) for name, f in figures], "{:.1f}")
        tails = [(name, f.itl_p99_s) for name, f in figures]
        known = [(name, tail * 1e3) for name, tail in tails if tail is not None]
        _print_chart(console, "P99 between tokens, ms", known, "{:.1f}")


def _print_table(console: Console, results: Sequence[Result], contest: Contest) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    columns = _columns(results, contest)
    num_runs = max((len(result.runs) for result in results), default=0)
    table = Table(title=f"medians of {num_runs} runs" if num_runs > 1 else None, title_justify="left", box=SIMPLE)
    table.add_column("", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=not title.count(" "))
    for result in results:
        cells = [show(result) for _, show in columns] if result.median is not None else ["failed"]
        table.add_row(escape(result.contestant.name), *cells)
    console.print(table)
    for result in results:
        if result.error is not None:
            console.print(escape(f"{result.contestant.name} failed: {result.error}"))


def _columns(results: Sequence[Result], contest: Contest) -> list[Column]:
    first = next((median.output_tokens_per_s for result in results if (median := result.median) is not None), 0.0)
    columns = [
        _column("tokens/s", "output_tokens_per_s", "{:.1f}"),
        ("times the first", lambda result: _spell(result, "output_tokens_per_s", "{:.2f}", 1 / first if first else 0)),
        _column("TTFT mean, s", "ttft_mean_s", "{:.2f}"),
        _column("TTFT P99, s", "ttft_p99_s", "{:.2f}"),
        _column("ITL P99, ms", "itl_p99_s", "{:.1f}", 1e3),
    ]
    if max((len(result.runs) for result in results), default=0) > 1:
        columns.insert(1, ("from-to", _spell_range))
    if contest.targets.ttft_s is not None or contest.targets.itl_s is not None:
        columns.append(_column("goodput, tokens/s", "goodput_tokens_per_s", "{:.1f}"))
        columns.append(_column("good rows, %", "good_rows", "{:.0f}", 100))
    columns += [
        _column("load, s", "load_s", "{:.1f}"),
        _column("peak memory, MiB", "peak_rss_bytes", "{:.0f}", 1 / MIB),
    ]
    if contest.device != "cpu":
        columns.append(_column("on the device, MiB", "peak_device_bytes", "{:.0f}", 1 / MIB))
    return columns


def _column(title: str, name: str, spelling: str, scale: float = 1.0) -> Column:
    return title, lambda result: _spell(result, name, spelling, scale)


def _spell(result: Result, name: str, spelling: str, scale: float) -> str:
    value = getattr(result.median, name)
    return NOTHING if value is None else spelling.format(value * scale)


def _spell_range(result: Result) -> str:
    speeds = [run.output_tokens_per_s for run in result.runs]
    return f"{min(speeds):.1f}-{max(speeds):.1f}"


def _print_chart(console: Console, title: str, values: Sequence[tuple[str, float]], spelling: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    most = max((value for _, value in values), default=0.0)
    if most <= 0:
        return
    mark = "#" if console.options.ascii_only else "█"
    chart = Table.grid(padding=(0, 1))
    for name, value in values:
        chart.add_row(escape(name), mark * max(1, round(BAR_WIDTH * value / most)), spelling.format(value))
    console.print(f"\n{title}")
    console.print(chart)
