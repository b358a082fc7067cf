"""`cbatch plan`: check what was asked, look at the job, show what it will be. Called by `app`.

The tables, or JSON, go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbatch.cli import plan_options
from cbatch.cli.console import quieten_libraries, say, showing_traceback
from cbatch.cli.run_options import check_present, read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import EngineConfig, JobConfig, PlanConfig
from cbatch.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def plan_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Look at one job and return the exit code: that which the job's row errors will give it."""
    found = read_given(inputs, config, given, plan_options.SETTINGS)
    check_present(found, "plan")
    console = found.build(ConsoleConfig)
    quieten_libraries(verbose=console.verbose)
    with showing_traceback(debug=console.debug):
        return _plan(found.build(PlanConfig), found.build(EngineConfig), found.job(output=""), console)


def _plan(plan: PlanConfig, engine: EngineConfig, job: JobConfig, console: ConsoleConfig) -> int:
    from cbatch.planning.job_plan import plan_job
    from cbatch.planning.summary import summarize

    with _counting(quiet=console.quiet) as tick:
        found = plan_job(job, engine, plan.calibration, tick)
    summary = summarize(found)
    if plan.json:
        import json

        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        from cbatch.cli.plan_tables import show_plan

        show_plan(summary, verbose=console.verbose)
    if found.misfit is not None:
        say(str(found.misfit))
        return found.misfit.exit_code
    failed = found.rows.num_errors > job.error_tolerance * found.rows.num_rows
    return EXIT_FAILED if failed else EXIT_OK


@contextmanager
def _counting(*, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many rows were looked at; give what is to be called for each."""
    from tqdm import tqdm

    with tqdm(unit="row", file=sys.stderr, leave=False, disable=quiet or not sys.stderr.isatty()) as bar:

        def tick() -> None:
            bar.update()

        yield tick
