"""`cbatch report`: write a finished run's page and say where it is. Called by `app`."""

from __future__ import annotations

import traceback
from pathlib import Path

from cbatch.cli.console import say
from cbatch.errors import EXIT_OK, UsageError


def report_command(output: str, page: str | None, *, quiet: bool, debug: bool) -> int:
    """Write the page of the run whose output is `output`, and return the exit code."""
    from cbatch.report.page import html_path, write_page

    target = html_path(Path(output)) if page is None else Path(page)
    try:
        if target.exists() and Path(output).exists() and target.samefile(output):
            raise UsageError(f"the output {output} would be overwritten by its report", hint="name another file")
        write_page(Path(output), target)
    except Exception:
        if debug:
            traceback.print_exc()
        raise
    if not quiet:
        say(f"{target}")
    return EXIT_OK
