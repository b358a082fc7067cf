"""`cbatch run`: check what was asked, run the job, say how it ended. Called by `app`.

Leaves out the job itself (`cbatch.jobs`), which is imported only once the options are known to be right.
"""

from __future__ import annotations

import traceback
from typing import Any

from cbatch.cli.console import quieten_libraries
from cbatch.cli.run_options import RunOptions, read_options
from cbatch.jobs.spinning import limit_spinning


def run_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Run one job and return the exit code."""
    options = read_options(inputs, config, given)
    quieten_libraries(verbose=options.console.verbose)
    limit_spinning()
    try:
        return _run(options)
    except Exception:
        if options.console.debug:
            traceback.print_exc()
        raise


def _run(options: RunOptions) -> int:
    from cbatch.cli.summary import show_summary
    from cbatch.jobs.run import run_job

    quiet = options.console.quiet
    summary = run_job(options.job, options.engine, quiet=quiet, verbose=options.console.verbose)
    show_summary(summary, quiet=quiet)
    return summary.exit_code
