"""A search from its options to its file: rows → sample → trials → `tuned.toml`. Called by `cbatch tune`.

Everything that can be checked is checked before the model loads; it is loaded once, and every trial builds an engine
over it. Each trial is in the journal when it ends: a search that was stopped, by whatever, goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch.config import EngineConfig, JobConfig, TuneConfig
from cbatch.errors import EXIT_OK, UsageError
from cbatch.jobs.lock import JobLock
from cbatch.jobs.opening import RowSetup, prepare_rows
from cbatch.jobs.progress import Progress
from cbatch.jobs.stop import Interrupted, Stop, handling_signals
from cbatch.jobs.survey import can_reread
from cbatch.tune.findings import Findings
from cbatch.tune.measure import EngineSource
from cbatch.tune.propose import Proposer, check_installed
from cbatch.tune.rows import InputRows
from cbatch.tune.search import Limits, Search
from cbatch.tune.session import Session
from cbatch.tune.space import choose_names
from cbatch.tune.tuned import check_target, write_tuned
from cbatch.units import parse_duration

LoadEngines = Callable[[EngineConfig], EngineSource]

DEFAULT_BUDGET = "10m"  # where neither budget nor trials are given
GRACE_S = 20.0  # for what a signal finds in the middle of a step


@dataclass(frozen=True, slots=True)
class TuneSummary:
    """How a search ended; nothing was found where it was stopped before its first trial."""

    exit_code: int
    output: Path
    findings: Findings | None = None
    num_trials: int = 0  # that are in the journal
    reason: str | None = None  # of an interruption


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Everything that one search was asked for, checked."""

    job: JobConfig
    engine: EngineConfig
    tune: TuneConfig
    given: Mapping[str, Any]  # settings of `run` that were given, for the file
    config: str | None  # the file that some of them came from
    names: tuple[str, ...]  # of the settings to search
    budget_s: float | None

    @property
    def output(self) -> Path:
        return Path(self.tune.output)


def run_tune(
    job: JobConfig,
    engine: EngineConfig,
    tune: TuneConfig,
    given: Mapping[str, Any],
    *,
    config: str | None = None,
    load: LoadEngines | None = None,
    quiet: bool = False,
) -> TuneSummary:
    """Search to the end, or until a signal stops it. Raises CbatchError where nothing can be searched."""
    began = time.monotonic()
    check_installed()
    request = TuneRequest(job, engine, tune, given, config, choose_names(engine, tune.search), _budget_s(tune))
    progress = Progress(quiet=quiet)
    stop = Stop()
    try:
        with handling_signals(stop, grace_s=GRACE_S, exit_code=job.interrupted_exit_code):
            with stop.interruptible():
                setup = _prepare(request)
            lock = Path(f"{tune.output}.lock")
            with JobLock(lock, force=job.force_unlock, lost=lambda: _lose_lock(stop)) as held:
                return _search(request, setup, load or _load_engines, stop, progress.say, began, held)
    except Interrupted as interrupted:  # before there was anything to keep
        return TuneSummary(job.interrupted_exit_code, request.output, reason=str(interrupted))
    finally:
        progress.close()


def _search(
    request: TuneRequest,
    setup: RowSetup,
    load: LoadEngines,
    stop: Stop,
    say: Callable[[str], None],
    began: float,
    lock: JobLock,
) -> TuneSummary:
    with stop.interruptible():
        rows = InputRows(setup, request.engine, stop.check)
        say(f"loading {request.engine.model}")
        engines = load(request.engine)
    with Session(request.output, rows, engines, request.names, request.engine, stop, say, began) as session:
        session.prepare(request.budget_s, datetime.now())
        search = Search(
            session.space,
            len(session.sample.rungs),
            session,
            Proposer(session.space, request.job.seed),
            Limits(request.tune.trials, request.budget_s, session.spent_s),
            known=session.known_points,
            on_trial=session.describe,
        )
        reason = None
        try:
            search.run()
        except Interrupted as interrupted:
            reason = str(interrupted)
        lock.check()
        findings = Findings(session.space, session.sample, search.book, search.verdict())
        if search.book.trials:
            write_tuned(request.output, request.given, findings, session.circumstances(), is_whole=reason is None)
        code = EXIT_OK if reason is None else request.job.interrupted_exit_code
        return TuneSummary(code, request.output, findings, len(search.book.trials), reason)


def _prepare(request: TuneRequest) -> RowSetup:
    """Check what there is to check of files. Raises UsageError, InputError, OutputError."""
    setup = prepare_rows(request.job)
    others = dict.fromkeys(setup.source.inputs, "the input")
    if request.config is not None:
        others[request.config] = "the configuration"
    check_target(request.output, others, replace=request.job.restart)
    if not can_reread(setup.source):
        raise UsageError("tune reads its input more than once", hint="write it to a file first")
    return setup


def _budget_s(tune: TuneConfig) -> float | None:
    """The seconds that a search may take; None where only the number of trials ends it. Raises UsageError."""
    budget = tune.budget or (DEFAULT_BUDGET if tune.trials is None else None)
    try:
        return None if budget is None else parse_duration(budget)
    except ValueError:
        raise UsageError(f"--budget must be a duration like 90s, 10m or 1h30m: it is {budget!r}") from None


def _load_engines(config: EngineConfig) -> EngineSource:
    from cbatch.tune.engines import LoadedEngines

    return LoadedEngines(config)


def _lose_lock(stop: Stop) -> None:
    stop.reason = "another run, which took the lock"
