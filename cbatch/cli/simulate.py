"""`cbatch simulate`: check what was asked, simulate, show the figures. Called by `app`.

The table goes to standard output, where the figures come from and what is being done to standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.cli import simulate_options
from cbatch.cli.console import say, showing_traceback
from cbatch.cli.run_options import Given, read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import EngineConfig, SimulateConfig
from cbatch.errors import EXIT_OK


def simulate_command(config: str | None, given: dict[str, Any]) -> int:
    """Run one comparison and return the exit code."""
    found = read_given([], config, given, simulate_options.SETTINGS)
    console = found.build(ConsoleConfig)
    with showing_traceback(debug=console.debug):
        return _simulate(found, console)


def _simulate(found: Given, console: ConsoleConfig) -> int:
    from cbatch.cli.simulate_tables import show_comparison, show_shards
    from cbatch.simulate.comparison import prepare_comparison
    from cbatch.simulate.results import write_results

    config = found.build(SimulateConfig)
    _check_targets(config)
    comparison = prepare_comparison(config, found.of(EngineConfig))
    if config.save_calibration is not None:
        comparison.calibration.save(Path(config.save_calibration))
    if not console.quiet:
        say(f"{len(comparison.workload)} requests; costs are of {comparison.calibration.source}")
        say(comparison.calibration.cost.describe())
    results = []
    for case, figures in comparison.run_all():
        if not console.quiet:
            say(f"{case.name} is simulated")
        results.append((case, figures))
    plan = comparison.plan_shards(config.gpus) if config.gpus is not None else None
    show_comparison(comparison, results)
    if plan is not None:
        show_shards(plan)
    if config.output is not None:
        write_results(Path(config.output), comparison, results, plan)
    return EXIT_OK


def _check_targets(config: SimulateConfig) -> None:
    """Refuse what cannot be written, or would be read, before anything is simulated. Raises UsageError, OutputError."""
    from cbatch.io.atomic import check_target
    from cbatch.jobs.report import files_of_run

    read = {"the calibration": config.calibration, "the file of lengths": config.lengths}
    others = {name: what for what, name in read.items() if name is not None}
    others |= files_of_run(config.fit) if config.fit is not None else {}
    for target in (config.save_calibration, config.output):
        if target is not None:
            check_target(Path(target), others)
            others[target] = "the calibration to be kept,"
