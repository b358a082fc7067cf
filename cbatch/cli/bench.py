"""`cbatch bench`: check what was asked, let everybody run, show the figures. Called by `app`.

The table goes to standard output, what happens meanwhile to standard error.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cbatch.cli import bench_options
from cbatch.cli.console import quieten_libraries, say
from cbatch.cli.run_options import Given, check_present, read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import BenchConfig, EngineConfig, JobConfig, SamplingParams
from cbatch.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from cbatch.bench.contest import Contest, Result


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything that one `cbatch bench` was asked for."""

    bench: BenchConfig
    engine: EngineConfig
    job: JobConfig
    console: ConsoleConfig


def bench_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Run one comparison and return the exit code: 1 where one of our own modes gave no figures."""
    options = _options(read_given(inputs, config, given, bench_options.SETTINGS))
    quieten_libraries(verbose=options.console.verbose)
    try:
        return _bench(options)
    except Exception:
        if options.console.debug:
            traceback.print_exc()
        raise


def _options(found: Given) -> BenchOptions:
    check_present(found, "bench")
    return BenchOptions(
        bench=BenchConfig(**found.of(BenchConfig)),
        engine=EngineConfig(**found.of(EngineConfig)),
        job=JobConfig(inputs=found.inputs, output="", sampling=found.of(SamplingParams), **found.of(JobConfig)),
        console=ConsoleConfig(**found.of(ConsoleConfig)),
    )


def _bench(options: BenchOptions) -> int:
    from cbatch.bench.contestants import read_modes, read_peers
    from cbatch.bench.output import check_output, write_results
    from cbatch.bench.setup import prepare_contest
    from cbatch.cli.bench_tables import show_results

    bench, quiet = options.bench, options.console.quiet
    check_output(bench.output, options.job.inputs)
    contestants = read_modes(bench.modes) + read_peers(bench.against)
    for contestant in contestants:
        if contestant.missing is not None:
            say(f"{contestant.name} takes no part: {contestant.missing}")
    contest = prepare_contest(options.job, options.engine, verbose=options.console.verbose)
    if not quiet:
        _say_workload(contest)
    began = datetime.now(UTC)
    results = contest.run(contestants, bench.repeats, _say_nothing if quiet else _say_run)
    show_results(results, contest)
    if bench.output is not None:
        write_results(bench.output, results, contest, began)
        if not quiet:
            say(f"every run is in {bench.output}")
    failed = [result for result in results if result.error is not None and not result.contestant.is_peer]
    return EXIT_FAILED if failed else EXIT_OK


def _say_workload(contest: Contest) -> None:
    workload = contest.workload
    say(
        f"{len(workload.rows)} rows, {workload.prompt_tokens} prompt tokens, {workload.output_tokens} tokens to "
        f"generate, in {contest.dtype} on {contest.device}; every run has a process of its own"
    )
    if workload.num_left_out:
        say(f"{workload.num_left_out} rows are left out; the first: {workload.first_error}")


def _say_run(result: Result, repeat: int) -> None:
    name = f"run {repeat + 1} of {result.contestant.name}"
    if result.error is not None:
        say(f"{name} failed: {result.error}")
    else:
        figures = result.runs[-1]
        say(f"{name}: {figures.output_tokens_per_s:.1f} tokens/s in {figures.generate_s:.1f} s")


def _say_nothing(_result: Result, _repeat: int) -> None:
    pass
