"""`cbatch run`: check what was asked, run the job, say how it ended. Called by `app`.

Leaves out the job itself (`cbatch.jobs`), which is imported only once the options are known to be right.
"""

from __future__ import annotations

from typing import Any

from cbatch.cli.console import quieten_libraries, say, showing_traceback
from cbatch.cli.run_options import RunOptions, read_options
from cbatch.cli.stdout import copy_out, with_file
from cbatch.jobs.spinning import limit_spinning
from cbatch.tune.evidence import loading_checked, other_work


def run_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Run one job and return the exit code."""
    options = read_options(inputs, config, given)
    quieten_libraries(verbose=options.console.verbose)
    limit_spinning()
    with showing_traceback(debug=options.console.debug):
        return _run(options)


def _run(options: RunOptions) -> int:
    from cbatch.cli.summary import show_summary
    from cbatch.jobs.run import run_job
    from cbatch.jobs.stop import ignore_signals

    quiet, job = options.console.quiet, with_file(options.job)
    evidence = options.evidence
    load = loading_checked(evidence, _say_nothing if quiet else say)
    summary = run_job(job, options.engine, load_engine=load, quiet=quiet, verbose=options.console.verbose)
    if summary.status == "interrupted":
        ignore_signals()
    elif job is not options.job:
        copy_out(summary.paths.output)
    show_summary(summary, quiet=quiet)
    if not quiet and (note := other_work(evidence, summary.report)) is not None:
        say(note)
    return summary.exit_code


def _say_nothing(_message: str) -> None:
    pass
