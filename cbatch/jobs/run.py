"""A job from its files to its files: source → prompts → engine → journal → output. Called by `cbatch run`.

Everything that can be checked is checked before the model loads, and the model loads only once a row needs it. Three
threads: the feeder reads and tokenises ahead, the main one runs the step loop, the writer decodes and writes.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

from cbatch.config import EngineConfig, JobConfig
from cbatch.engine.stats import EngineStats
from cbatch.errors import EXIT_FAILED, EXIT_OK, RowError, UsageError
from cbatch.io.sources import open_source
from cbatch.jobs import report as reporting
from cbatch.jobs.assemble import Layout, assemble, content_digest
from cbatch.jobs.counting import RowCount
from cbatch.jobs.feeder import Feeder
from cbatch.jobs.identity import identify_model
from cbatch.jobs.journal import Head, Journal, Recovery
from cbatch.jobs.keys import job_identity
from cbatch.jobs.ledger import Ledger
from cbatch.jobs.lock import JobLock
from cbatch.jobs.loop import BatchEngine, StepLoop, check_errors
from cbatch.jobs.params import ParamReader, check_model_defaults
from cbatch.jobs.paths import JobPaths
from cbatch.jobs.progress import Progress
from cbatch.jobs.prompts import PromptEncoder
from cbatch.jobs.reader import JobReader, JobRow
from cbatch.jobs.rendering import Renderer
from cbatch.jobs.results import Session, failed_entry
from cbatch.jobs.stop import RESUME_HINT, Interrupted, Stop, handling_signals
from cbatch.jobs.totals import Targets
from cbatch.jobs.writer import RowIndex, Writer

LoadEngine = Callable[[EngineConfig], BatchEngine]

FEEDER_STOP_S = 1.0  # a read that blocks longer is left behind
AHEAD = 2  # rows tokenised ahead, in batches of the engine


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How a job ended. `report` is what `OUT.report.json` holds; {} where the job was interrupted."""

    status: Literal["done", "unchanged", "interrupted"]
    exit_code: int
    paths: JobPaths
    rows: int = 0
    rows_ok: int = 0
    rows_error: int = 0
    rows_replayed: int = 0  # of all, finished before this process began
    report: dict[str, Any] = field(default_factory=dict)
    first_error: str | None = None
    reason: str | None = None  # of an interruption


def run_job(
    job: JobConfig,
    engine_config: EngineConfig,
    *,
    load_engine: LoadEngine | None = None,
    quiet: bool = False,
    verbose: bool = False,
) -> JobSummary:
    """Run a job to its end, or until a signal stops it, and say how it ended. Raises CbatchError where it failed."""
    stop = Stop()
    try:
        with handling_signals(stop, grace_s=job.grace, exit_code=job.interrupted_exit_code):
            run = _JobRun(job, engine_config, load_engine or _load_engine, stop, quiet=quiet, verbose=verbose)
            with run:
                return run.execute()
    except Interrupted as interrupted:
        return JobSummary(
            "interrupted",
            job.interrupted_exit_code,
            JobPaths.of(job.output, job.checkpoint_dir),
            reason=str(interrupted),
        )


def _load_engine(config: EngineConfig) -> BatchEngine:
    from cbatch.engine.engine import Engine

    return Engine.load(config)


class _JobRun:
    """One process's work on a job. Entered, it holds the output's lock."""

    def __init__(
        self,
        job: JobConfig,
        engine_config: EngineConfig,
        load_engine: LoadEngine,
        stop: Stop,
        *,
        quiet: bool,
        verbose: bool,
    ) -> None:
        """Check everything that needs neither the lock nor the model. Raises UsageError, InputError, OutputError."""
        self._began = time.monotonic()
        self._started_at = datetime.now(UTC)
        self._job = job
        self._engine_config = engine_config
        self._load_engine = load_engine
        self._stop = stop
        self._verbose = verbose
        self._params = ParamReader(job.sampling, row_params=job.row_params)
        with stop.interruptible():
            self._source = open_source(job.inputs)
            self._paths = JobPaths.of(job.output, job.checkpoint_dir)
            self._paths.check(self._source.inputs)
            self._model_identity = identify_model(engine_config)
        self._row_count = RowCount(self._source, job.limit)
        self._progress = Progress(quiet=quiet, count_rows=lambda: self._row_count.value)
        self._engine: BatchEngine | None = None
        self._environment = reporting.environment()
        self._facts: dict[str, Any] = {}
        self._resources = ExitStack()

    def __enter__(self) -> _JobRun:
        lock = JobLock(self._paths.lock, force=self._job.force_unlock, lost=self._stop_because_lock_lost)
        self._lock = self._resources.enter_context(lock)
        self._resources.callback(self._progress.close)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._resources.close()

    def execute(self) -> JobSummary:
        """Run every row that is not finished, then put the output together."""
        journal, ledger, recovery = self._open_journal()
        fit = f"{self._job.on_overlong} {self._engine_config.max_model_len}"
        self._session = Session(recovery.num_sessions + 1, fit, self._job.return_token_ids)
        self._facts = recovery.facts
        self._journal = journal
        self._index = RowIndex()
        self._writer = Writer(journal, self._index)
        rows = islice(self._source, self._job.limit)
        identity = job_identity(self._model_identity, self._job.generation_config, self._job.seed)
        reader = JobReader(rows, Renderer(self._job.prompt_column), self._params, ledger, identity)
        try:
            self._run_rows(reader)
            self._writer.close()
            return self._finish(reader, ledger)
        except Interrupted as interrupted:
            self._writer.close()
            self._lock.check()
            return self._interrupted(str(interrupted))
        finally:
            self._writer.close()

    def _open_journal(self) -> tuple[Journal, Ledger, Recovery]:
        """Open the journal and learn from it which rows are finished."""
        job, paths = self._job, self._paths
        if job.restart:
            paths.journal.unlink(missing_ok=True)
        elif paths.output.exists() and not paths.journal.exists():
            raise UsageError(
                f"{paths.output} exists, and there is no journal of it at {paths.journal}",
                hint="--restart replaces it; or name another output",
            )
        journal = Journal(paths.journal)
        self._resources.callback(journal.close)
        ledger = Ledger(journal.count_lines(), journal.has_key)
        fit = f"{job.on_overlong} {self._engine_config.max_model_len}"

        def add(head: Head, offset: int) -> None:
            retry = (job.retry_errors and not head.ok) or (head.fit is not None and head.fit != fit)
            ledger.add(head.key, offset, head.attempt, retry=retry)

        recovery = journal.recover(add)
        if len(ledger):
            self._progress.say(f"{len(ledger)} finished rows found in {paths.journal}")
        if recovery.num_damaged:
            self._progress.say(f"{recovery.num_damaged} damaged lines in {paths.journal} are left out")
        return journal, ledger, recovery

    def _run_rows(self, reader: JobReader) -> None:
        """Give every row an entry; the engine is loaded for the first one that needs it."""
        rows = iter(reader)
        with self._stop.interruptible():
            first = next((row for row in rows if not self._settle(row)), None)
            if first is None:
                return
            self._row_count.start()
            self._progress.say(f"loading {self._engine_config.model}")
            engine = self._engine = self._load_engine(self._engine_config)
        self._describe(engine)
        defaults = engine.generation_defaults if self._job.generation_config == "auto" else {}
        encoder = PromptEncoder(engine.tokenizer, engine.plan.max_model_len, self._job.on_overlong)
        feeder = Feeder(
            chain([first], rows),
            encoder,
            check_model_defaults(defaults),
            self._job.seed,
            max_ahead=AHEAD * engine.plan.max_requests_per_batch,
            fail=self._fail,
            replay=self._replay,
        )
        loop = StepLoop(
            engine,
            feeder,
            self._writer,
            self._session,
            stop=self._stop,
            progress=self._progress,
            grace_s=self._job.grace,
            max_errors=self._job.max_errors,
        )
        try:
            loop.run()
        finally:
            feeder.stop(FEEDER_STOP_S)

    def _settle(self, row: JobRow) -> bool:
        """Hand a row on that needs no engine; False for one that does."""
        self._writer.check()
        check_errors(self._writer, self._job.max_errors)
        if row.claim.offset is not None:
            self._replay(row)
        elif row.error is not None:
            self._fail(row, row.error)
        else:
            return False
        return True

    def _fail(self, row: JobRow, error: RowError) -> None:
        self._writer.write(row.index, partial(failed_entry, row, error, self._session))

    def _replay(self, row: JobRow) -> None:
        assert row.claim.offset is not None
        self._writer.replay(row.index, row.claim.offset)

    def _describe(self, engine: BatchEngine) -> None:
        """Say what was decided, and keep it in the journal for whoever finishes the job."""
        settings = engine.plan.settings()
        self._facts = {"load_s": engine.load_s, "settings": settings, **self._environment}
        self._writer.note(self._session.number, self._facts)
        if self._verbose:
            for name, setting in settings.items():
                self._progress.say(f"{name} = {setting['value']} ({setting['reason']})")
        else:
            words = ", ".join(f"{name} {setting['value']}" for name, setting in settings.items())
            self._progress.say(f"loaded in {engine.load_s:.1f} s: {words}")

    def _finish(self, reader: JobReader, ledger: Ledger) -> JobSummary:
        """Put the output and its report together, unless they are there already."""
        check_errors(self._writer, self._job.max_errors)
        unused = len(ledger) - ledger.num_replayed
        self._lock.check()
        layout = Layout(
            self._paths.output,
            self._job.order,
            self._job.return_token_ids,
            self._source.schema,
            frozenset(reader.colliding_names),
        )
        offsets, digest = self._index.offsets, content_digest(layout, self._index.offsets, reader.digest)
        earlier = reporting.read_report(self._paths.report)
        if self._paths.output.exists() and earlier.get("hashes", {}).get("content") == digest:
            return self._summary("unchanged", earlier)
        if unused and ledger.num_replayed:
            self._progress.say(f"{unused} rows in {self._paths.journal} are of another input or other settings: unused")
        return self._assemble(layout, offsets, digest, reader.digest)

    def _assemble(self, layout: Layout, offsets: array[int], digest: str, rows_digest: str) -> JobSummary:
        targets = Targets(self._job.goodput_ttft, self._job.goodput_itl)

        def tick(_number: int) -> None:
            self._stop.check()

        totals = assemble(self._journal, offsets, layout, targets, tick)
        stats = self._engine.stats if self._engine is not None else EngineStats()
        if self._engine is not None:
            totals.generate_s[self._session.number] = stats.generate_s
        report = {
            **reporting.row_figures(totals),
            **reporting.engine_figures(stats),
            "load_s": self._engine.load_s if self._engine is not None else 0.0,
            "wall_s": time.monotonic() - self._began,
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "peak_rss_bytes": reporting.peak_rss_bytes(),
            **reporting.request_of(self._job, self._engine_config),
            "session": self._session_figures(totals.output_tokens_of[self._session.number], stats),
            "settings": self._facts.get("settings", {}),
            **self._environment,
            "hashes": {"model": self._model_identity.hex(), "rows": rows_digest, "content": digest},
        }
        reporting.write_report(self._paths.report, report)
        return self._summary("done", report, totals.first_error)

    def _session_figures(self, output_tokens: int, stats: EngineStats) -> dict[str, Any]:
        tally = self._writer.tally
        return {
            "number": self._session.number,
            "rows": tally.num_rows - tally.num_replayed,
            "rows_replayed": tally.num_replayed,
            "output_tokens": output_tokens,
            "generate_s": stats.generate_s,
        }

    def _summary(
        self, status: Literal["done", "unchanged"], report: dict[str, Any], first_error: str | None = None
    ) -> JobSummary:
        tally = self._writer.tally
        failed = tally.num_errors > self._job.error_tolerance * tally.num_rows
        return JobSummary(
            status,
            EXIT_FAILED if failed else EXIT_OK,
            self._paths,
            tally.num_rows,
            tally.num_ok,
            tally.num_errors,
            tally.num_replayed,
            report,
            first_error,
        )

    def _interrupted(self, reason: str) -> JobSummary:
        tally = self._writer.tally
        self._progress.say(f"stopped by {reason}: {tally.num_rows} finished rows are safe; {RESUME_HINT}")
        return JobSummary(
            "interrupted",
            self._job.interrupted_exit_code,
            self._paths,
            tally.num_rows,
            tally.num_ok,
            tally.num_errors,
            tally.num_replayed,
            reason=reason,
        )

    def _stop_because_lock_lost(self) -> None:
        self._stop.reason = "another run, which took the lock"
