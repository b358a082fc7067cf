"""`cbatch run`: check what was asked, run the job, say how it ended. Called by `app`.

Leaves out the job itself (`cbatch.jobs`), which is imported only once the options are known to be right.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

from cbatch.cli.console import quieten_libraries
from cbatch.cli.run_options import RunOptions, read_options

# Turns that a thread of GNU OpenMP spins before it sleeps. By default it spins for milliseconds after every operation;
# where anything else wants the cores, that starves the very thread it waits for (docs/measurements.md).
SPIN_COUNT = "1000"


def run_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Run one job and return the exit code."""
    options = read_options(inputs, config, given)
    quieten_libraries(verbose=options.console.verbose)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
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
