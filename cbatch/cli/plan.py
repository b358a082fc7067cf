"""`cbatch plan`: check what was asked, look at the job, show what it will be. Called by `app`.

The tables, or JSON, go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.cli import plan_options
from cbatch.cli.console import quieten_libraries, say
from cbatch.cli.run_options import Given, check_present, read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import EngineConfig, JobConfig, PlanConfig, SamplingParams
from cbatch.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything that one `cbatch plan` was asked for."""

    plan: PlanConfig
    engine: EngineConfig
    job: JobConfig
    console: ConsoleConfig


def plan_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Look at one job and return the exit code: that which the job's row errors will give it."""
    options = _options(read_given(inputs, config, given, plan_options.SETTINGS))
    quieten_libraries(verbose=options.console.verbose)
    try:
        return _plan(options)
    except Exception:
        if options.console.debug:
            traceback.print_exc()
        raise


def _options(found: Given) -> PlanOptions:
    check_present(found, "plan")
    return PlanOptions(
        plan=PlanConfig(**found.of(PlanConfig)),
        engine=EngineConfig(**found.of(EngineConfig)),
        job=JobConfig(inputs=found.inputs, output="", sampling=found.of(SamplingParams), **found.of(JobConfig)),
        console=ConsoleConfig(**found.of(ConsoleConfig)),
    )


def _plan(options: PlanOptions) -> int:
    from cbatch.planning.job_plan import plan_job
    from cbatch.planning.summary import summarize

    with _counting(quiet=options.console.quiet) as tick:
        found = plan_job(options.job, options.engine, options.plan.calibration, tick)
    summary = summarize(found)
    if options.plan.json:
        import json

        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        from cbatch.cli.plan_tables import show_plan

        show_plan(summary, verbose=options.console.verbose)
    if found.misfit is not None:
        say(str(found.misfit))
        return found.misfit.exit_code
    failed = found.rows.num_errors > options.job.error_tolerance * found.rows.num_rows
    return EXIT_FAILED if failed else EXIT_OK


@contextmanager
def _counting(*, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many rows were looked at; give what is to be called for each."""
    from tqdm import tqdm

    with tqdm(unit="row", file=sys.stderr, leave=False, disable=quiet or not sys.stderr.isatty()) as bar:

        def tick() -> None:
            bar.update()

        yield tick
