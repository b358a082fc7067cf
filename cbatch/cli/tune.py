"""`cbatch tune`: check what was asked, search, show what was found. Called by `app`.

Leaves out the search itself (`cbatch.tune`), which is imported only once the options are known to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbatch.cli import options, tune_options
from cbatch.cli.config_file import INPUTS
from cbatch.cli.console import quieten_libraries, say, showing_traceback
from cbatch.cli.run_options import Given, check_present, read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import EngineConfig, JobConfig, TuneConfig
from cbatch.jobs.spinning import limit_spinning

ABOUT_THIS_SEARCH = ("restart", "force_unlock")  # no part of what `run` is to do with the settings


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Everything that one `cbatch tune` was asked for."""

    tune: TuneConfig
    engine: EngineConfig
    job: JobConfig
    console: ConsoleConfig
    given: dict[str, Any]  # for `run`, by the names of its settings
    config: str | None


def tune_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Run one search and return the exit code."""
    asked = read_tune_options(inputs, config, given)
    quieten_libraries(verbose=asked.console.verbose)
    limit_spinning()
    with showing_traceback(debug=asked.console.debug):
        return _tune(asked)


def read_tune_options(inputs: list[str], config: str | None, given: dict[str, Any]) -> TuneOptions:
    """Check what was given; a configuration file may hold all settings of `run`, which the tuned file then has too."""
    found = read_given(inputs, config, given, tune_options.SETTINGS)
    check_present(found, "tune")
    return TuneOptions(
        tune=found.build(TuneConfig),
        engine=found.build(EngineConfig),
        job=found.job(output=""),
        console=found.build(ConsoleConfig),
        given=_for_run(found),
        config=config,
    )


def _for_run(found: Given) -> dict[str, Any]:
    """Choose what `run` is given: all that was in the file, and what the command line says over it."""
    own = {setting.name for setting in tune_options.TUNE_SETTINGS}
    console = {setting.name for setting in options.SETTINGS if setting.target is ConsoleConfig}
    values = {name: value for name, value in found.values.items() if name not in own | console | {*ABOUT_THIS_SEARCH}}
    in_file = {name: value for name, value in found.file.settings.items() if name not in ABOUT_THIS_SEARCH}
    return in_file | values | ({INPUTS: found.inputs} if INPUTS in in_file else {})


def _tune(asked: TuneOptions) -> int:
    from cbatch.cli.tune_tables import show_findings
    from cbatch.jobs.stop import RESUME_HINT
    from cbatch.tune.run import run_tune

    quiet = asked.console.quiet
    summary = run_tune(asked.job, asked.engine, asked.tune, asked.given, config=asked.config, quiet=quiet)
    if not quiet:
        show_findings(summary)
    if summary.reason is not None:
        say(f"stopped by {summary.reason}: {summary.num_trials} trials are safe; {RESUME_HINT}")
    return summary.exit_code
