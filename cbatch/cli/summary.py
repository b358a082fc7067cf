"""How a job ended, for a person: one line in a log, a small table on a terminal. On standard error. Used by `run`.

Leaves out progress and what is said while a job runs, which are the job's; the full figures are in the report.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cbatch.cli.console import say, summary_console
from cbatch.jobs.stop import RESUME_HINT
from cbatch.units import format_bytes

if TYPE_CHECKING:
    from cbatch.jobs.run import JobSummary


def show_summary(summary: JobSummary, *, quiet: bool) -> None:
    """Say how a job ended; where quiet, only what went wrong, and that it is to be resumed."""
    if summary.status == "interrupted":
        safe = f": {_count(summary.rows, 'finished row')} safe" if summary.rows else ""
        say(f"stopped by {summary.reason}{safe}; {RESUME_HINT}")
    elif summary.status == "unchanged" and not quiet:
        say(f"{summary.paths.output} is finished already, nothing was done; --restart runs it again")
    elif summary.status == "done" and not quiet:
        if sys.stderr.isatty():
            _print_table(summary)
        else:
            say(_line(summary))
    if summary.status != "interrupted" and summary.exit_code:
        hint = "--retry-errors runs them again, --error-tolerance lets a share of rows fail"
        first = f"; the first: {summary.first_error}" if summary.first_error else ""
        file = summary.report.get("errors_file")
        where = f", see {summary.paths.output.with_name(file)}" if file else ""
        say(f"{summary.rows_error} of {_count(summary.rows, 'row')} failed{where}{first} ({hint})")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _line(summary: JobSummary) -> str:
    report = summary.report
    rows = (
        f"{_count(summary.rows, 'row')} in {report['wall_s']:.1f} s: {summary.rows_ok} ok, {summary.rows_error} failed"
    )
    tokens = f"{report['output_tokens']} tokens, {report['output_tokens_per_s']:.1f} a second of generation"
    return f"{rows}, {tokens}; {summary.paths.output} and {summary.paths.report.name}"


def _print_table(summary: JobSummary) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # the names of files whole, on a narrow terminal too
    for name, value in _figures(summary):
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    summary_console().print(table)


def _figures(summary: JobSummary) -> list[tuple[str, str]]:
    report: dict[str, Any] = summary.report
    failed = f", {summary.rows_error} failed" if summary.rows_error else ""
    again = f", {summary.rows_replayed} of them from an earlier run" if summary.rows_replayed else ""
    cached = report["cached_tokens"] / report["prompt_tokens"] if report["prompt_tokens"] else 0.0
    return [
        ("rows", f"{summary.rows_ok} ok{failed}{again}"),
        ("prompts", f"{report['prompt_tokens']} tokens, {cached:.0%} of them reused from the cache"),
        ("completions", f"{report['output_tokens']} tokens, {report['output_tokens_per_s']:.1f} tokens/s"),
        ("time", f"{report['wall_s']:.1f} s, of which {report['load_s']:.1f} s loading"),
        ("memory", f"{format_bytes(report['peak_rss_bytes'])} at most"),
        ("output", str(summary.paths.output)),
        ("report", str(summary.paths.report)),
    ]
