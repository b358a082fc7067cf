"""`cbatch report`: write a finished run's page and say where it is. Called by `app`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.cli.console import say, showing_traceback
from cbatch.cli.options import CONSOLE_SETTINGS
from cbatch.cli.run_options import read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.errors import EXIT_OK


def report_command(output: str, page: str | None, given: dict[str, Any]) -> int:
    """Write the page of the run whose output is `output`, and return the exit code."""
    from cbatch.io.atomic import check_target
    from cbatch.jobs.report import files_of_run
    from cbatch.report.page import html_path, write_page

    console = read_given([], None, given, CONSOLE_SETTINGS).build(ConsoleConfig)
    run = Path(output)
    with showing_traceback(debug=console.debug):
        read = files_of_run(output)
        target = html_path(run) if page is None else Path(page)
        check_target(target, read)
        write_page(run, target)
    if not console.quiet:
        say(f"{target}")
    return EXIT_OK
