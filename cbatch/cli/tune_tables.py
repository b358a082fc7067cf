"""What a search found, for a person: a table with a bar a configuration, plain lines in a log. Used by `tune`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cbatch.cli.console import say, summary_console
from cbatch.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from cbatch.tune.findings import Findings, Line
    from cbatch.tune.run import TuneSummary

BAR_WIDTH = 24
CHOSEN = "bold green"
FAILED = "red"


def show_findings(summary: TuneSummary) -> None:
    """Say what was found, and where it is, on standard error."""
    findings = summary.findings
    if findings is None or not findings.book.trials:
        return
    if sys.stderr.isatty():
        console = summary_console()
        console.print(_table(findings, has_bars=console.encoding.lower().startswith("utf")))
    else:
        for line in findings.lines():
            say(_words(line, findings))
    say(findings.conclusion())
    if findings.is_noisy:
        say(f"measurements of the same differ by {findings.verdict.noise:.0%}: does something else run here?")
    say(f"the settings are in {summary.output}: cbatch run INPUT --config {summary.output} -o OUTPUT")


def _table(findings: Findings, *, has_bars: bool) -> Table:
    from rich.table import Table

    lines = findings.lines()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in findings.space.names:
        table.add_column(name, justify="right")
    for name in ("rows", findings.unit, "times default", "memory"):
        table.add_column(name, justify="right")
    table.add_column("", min_width=BAR_WIDTH)
    most = max((line.times_default or 0.0 for line in lines), default=0.0) if has_bars else 0.0
    for line in lines:
        style = CHOSEN if line.is_chosen else FAILED if line.failure else None
        table.add_row(*_cells(line, findings, most), style=style)
    return table


def _cells(line: Line, findings: Findings, most: float) -> list[RenderableType]:
    from rich.bar import Bar

    cells: list[RenderableType] = [str(line.settings[name]) for name in findings.space.names]
    if line.failure is not None:
        return [*cells, "", "failed", "", "", line.failure]
    times = line.times_default
    return [
        *cells,
        str(line.num_rows),
        _speed(line),
        "" if times is None else f"{times:.3f}",
        format_bytes(line.memory_bytes),
        Bar(most, 0, times, width=BAR_WIDTH) if times is not None and most else "",
    ]


def _words(line: Line, findings: Findings) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in line.settings.items())
    marks = [word for word, holds in (("default", line.is_default), ("chosen", line.is_chosen)) if holds]
    name = f"{settings} ({', '.join(marks)})" if marks else settings
    if line.failure is not None:
        return f"{name}: failed, {line.failure}"
    times = "" if line.times_default is None else f", {line.times_default:.3f} times the default"
    memory = format_bytes(line.memory_bytes)
    return f"{name}: {_speed(line)} {findings.unit} over {line.num_rows} rows{times}, {memory} in use"


def _speed(line: Line) -> str:
    spread = f" +/- {line.spread:.1f}" if len(line.speeds) > 1 else ""
    return f"{line.tokens_per_s:.1f}{spread}"
