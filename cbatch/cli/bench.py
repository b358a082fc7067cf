"""`cbatch bench`: check what was asked, let everybody run, show the figures. Called by `app`.

The table goes to standard output, what happens meanwhile to standard error.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cbatch.cli import bench_options
from cbatch.cli.console import quieten_libraries, say, showing_traceback
from cbatch.cli.run_options import check_present, read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import BenchConfig, EngineConfig, JobConfig
from cbatch.errors import EXIT_ABORTED, EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from cbatch.bench.contest import Contest, Result


def bench_command(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
    """Run one comparison and return the exit code: 1 where one of our own modes gave no figures."""
    found = read_given(inputs, config, given, bench_options.SETTINGS)
    check_present(found, "bench")
    console = found.build(ConsoleConfig)
    quieten_libraries(verbose=console.verbose)
    with showing_traceback(debug=console.debug):
        return _bench(found.build(BenchConfig), found.build(EngineConfig), found.job(output=""), console, config)


def _bench(bench: BenchConfig, engine: EngineConfig, job: JobConfig, console: ConsoleConfig, config: str | None) -> int:
    from cbatch.bench.contest import enter
    from cbatch.bench.contestants import choose_modes, read_peers
    from cbatch.bench.output import write_results
    from cbatch.bench.setup import prepare_contest
    from cbatch.cli.bench_tables import show_results

    contestants = choose_modes(bench.modes) + read_peers(bench.against)
    for contestant in contestants:
        if contestant.missing is not None:
            say(f"{contestant.name} takes no part: {contestant.missing}")
    contest = prepare_contest(job, engine, bench.output, config, verbose=console.verbose)
    if not console.quiet:
        _say_workload(contest)
    began = datetime.now(UTC)
    results = enter(contestants)
    is_whole = True
    try:
        contest.run(results, bench.repeats, _say_nothing if console.quiet else _say_run)
    except KeyboardInterrupt:  # what has run so far took its time
        is_whole = False
    show_results(results, contest)
    if bench.output is not None:
        write_results(bench.output, results, contest, began)
        if not console.quiet:
            say(f"every run is in {bench.output}")
    if not is_whole:
        say("stopped by SIGINT: the figures are of the runs that had ended")
        return EXIT_ABORTED
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
