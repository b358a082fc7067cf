"""A job from its files to its files: source → prompts → engine → journal → output. Called by `cbatch run`.

Everything that can be checked is checked before the model loads, and the model loads only once a row needs it. Three
threads: the feeder reads and tokenises ahead, the main one runs the step loop, the writer decodes and writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

from cbatch.compatibility import Facts, check
from cbatch.config import EngineConfig, JobConfig
from cbatch.engine.load import load_engine
from cbatch.engine.stats import EngineStats
from cbatch.errors import EXIT_FAILED, EXIT_OK, OutputError, RowError
from cbatch.io.columns import ROW_WORDS
from cbatch.jobs import report as reporting
from cbatch.jobs.assemble import Layout
from cbatch.jobs.checkpoint import CLOCK, Checkpoint, check_same_bits, open_checkpoint
from cbatch.jobs.counting import RowCount
from cbatch.jobs.encoding import RowEncoder
from cbatch.jobs.feeder import Feeder
from cbatch.jobs.finish import SessionFigures, finish
from cbatch.jobs.lock import JobLock
from cbatch.jobs.loop import BatchEngine, StepLoop, check_errors
from cbatch.jobs.opening import OpenRows, open_rows
from cbatch.jobs.params import check_model_defaults, resolve
from cbatch.jobs.paths import JobPaths
from cbatch.jobs.progress import Progress, saying_warnings
from cbatch.jobs.prompts import PromptEncoder
from cbatch.jobs.reader import JobReader, JobRow
from cbatch.jobs.results import failed_entry
from cbatch.jobs.rowindex import RowIndex
from cbatch.jobs.setup import JobSetup, prepare
from cbatch.jobs.shards import Part
from cbatch.jobs.stop import Interrupted, Stop, handling_signals
from cbatch.jobs.survey import Survey, survey
from cbatch.jobs.trace import tracing
from cbatch.jobs.writer import Writer

LoadEngine = Callable[[EngineConfig], BatchEngine]

FEEDER_STOP_S = 1.0  # a read that blocks longer is left behind
AHEAD = 2  # rows tokenised ahead, in batches of the engine


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How a job ended. `report` is what `OUT.report.json` holds; {} where the job was interrupted.

    The `rows` of a job that was interrupted are those that are finished and safe.
    """

    status: Literal["done", "unchanged", "interrupted"]
    exit_code: int
    paths: JobPaths
    rows: int = 0
    rows_ok: int = 0
    rows_error: int = 0
    rows_replayed: int = 0  # of all, finished before this process began
    report: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None  # of an interruption

    @property
    def first_error(self) -> str | None:
        """What went wrong with the first row that failed."""
        message: str | None = self.report.get("first_error")
        return message


def run_job(
    job: JobConfig,
    engine_config: EngineConfig,
    *,
    load_engine: LoadEngine = load_engine,
    quiet: bool = False,
    verbose: bool = False,
) -> JobSummary:
    """Run a job to its end, or until a signal stops it, and say how it ended. Raises CbatchError where it failed."""
    began = time.monotonic()
    stop = Stop()
    try:
        with handling_signals(stop, grace_s=job.grace, exit_code=job.interrupted_exit_code):
            with stop.interruptible():
                setup = prepare(job, engine_config)
            with _JobRun(setup, load_engine, stop, began, quiet=quiet, verbose=verbose) as run:
                return run.execute()
    except Interrupted as interrupted:  # before there was anything to keep
        paths = JobPaths.of(job.output, job.checkpoint_dir)
        return JobSummary("interrupted", job.interrupted_exit_code, paths, reason=str(interrupted))


class _JobRun:
    """One process's work on a job. Entered, it holds the output's lock; left, it holds nothing."""

    def __init__(
        self, setup: JobSetup, load_engine: LoadEngine, stop: Stop, began: float, *, quiet: bool, verbose: bool
    ) -> None:
        self._setup = setup
        self._job = setup.job
        self._load_engine = load_engine
        self._stop = stop
        self._began = began
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._verbose = verbose
        self._row_count = RowCount(setup.source, setup.job.limit)
        self._progress = Progress(quiet=quiet, count_rows=lambda: self._row_count.value)
        self._engine: BatchEngine | None = None
        self._loop: StepLoop | None = None
        self._part: Part | None = None
        self._resources = ExitStack()

    def __enter__(self) -> _JobRun:
        force, lost = self._job.force_unlock, self._stop_because_lock_lost
        with self._resources:
            locks = [JobLock(path, force=force, lost=lost) for path in self._setup.paths.locks]
            self._locks = [self._resources.enter_context(lock) for lock in locks]
            self._resources.callback(self._progress.close)
            self._resources.enter_context(saying_warnings(self._progress.say))
            self._checkpoint: Checkpoint = open_checkpoint(self._setup, self._progress.say)
            self._resources.callback(self._checkpoint.journal.close)
            self._resources = self._resources.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._resources.close()

    def execute(self) -> JobSummary:
        """Run every row that is not finished, then put the output together."""
        self._facts = self._checkpoint.facts
        self._num_recovered = len(self._checkpoint.ledger)
        try:
            with self._stop.interruptible():
                opened = self._open_rows()
                surveyed = self._survey_shard(openai=opened.openai)
            self._index = RowIndex(self._part.rows.start if self._part is not None else 0)
            self._writer = Writer(self._checkpoint.journal, self._index)
        except Interrupted as interrupted:
            code, paths, rows = self._job.interrupted_exit_code, self._setup.paths, self._num_recovered
            return JobSummary("interrupted", code, paths, rows, reason=str(interrupted))
        try:
            own = self._part.rows if self._part is not None else None
            reader = JobReader(opened.rows, opened.interpret, self._checkpoint.ledger, self._setup.identity, own)
            self._run_rows(reader)
            self._writer.close()
            return self._finish(reader, surveyed, openai=opened.openai)
        except OutputError as error:
            journal = self._setup.paths.journal
            hint = error.hint or f"the finished rows are safe in {journal}; run the same command again to go on"
            raise OutputError(error.message, hint=hint) from error
        except Interrupted as interrupted:
            self._writer.close()
            self._check_locks()
            return self._interrupted(str(interrupted))
        finally:
            self._writer.close()

    def _open_rows(self) -> OpenRows:
        """Open the input; an OpenAI Batch file is answered in its own format."""
        opened = open_rows(self._setup, self._stop.check)
        is_parquet = self._setup.paths.output.suffix.lower() == ".parquet"
        check(Facts(openai_batch=opened.openai, parquet_output=is_parquet))
        return opened

    def _survey_shard(self, *, openai: bool) -> Survey | None:
        """Find this shard's rows by looking at all of them."""
        setup = self._setup
        if setup.shard is None:
            return None
        self._progress.say(f"{setup.shard.source}: part {setup.shard.index} of {setup.shard.count}, counted from 0")
        infer = setup.paths.output.suffix.lower() == ".parquet" and setup.source.schema is None and not openai
        surveyed = survey(islice(setup.source, self._job.limit), infer=infer, tick=self._stop.check)
        own = setup.shard.rows(surveyed.num_rows)
        self._part = Part(setup.shard, own, surveyed.num_rows, setup.job_digest(surveyed.digest))
        self._row_count.value = len(self._part.rows)
        self._progress.say(f"rows {self._part.rows.start} to {self._part.rows.stop - 1} of {surveyed.num_rows}")
        return surveyed

    def _run_rows(self, reader: JobReader) -> None:
        """Give every row an entry; the engine is loaded for the first one that needs it."""
        rows = iter(reader)
        with self._stop.interruptible():
            first = next((row for row in rows if not self._settle(row)), None)
            if first is None:
                return
            self._row_count.start()
            self._progress.say(f"loading {self._setup.engine.model}")
            engine = self._engine = self._load_engine(self._setup.engine)
        taken = engine.generation_defaults if self._job.generation_config == "auto" else {}
        defaults = check_model_defaults(taken)
        self._describe(engine, defaults)
        engine.prepare(resolve(first.given, defaults, seed=0))
        prompts = PromptEncoder(
            engine.tokenizer, engine.plan.max_model_len, self._job.on_overlong, self._checkpoint.clock
        )
        feeder = Feeder(
            chain([first], rows),
            RowEncoder(prompts, defaults, self._job.seed),
            max_ahead=AHEAD * engine.plan.max_requests_per_batch,
            fail=self._fail,
            replay=self._replay,
        )
        loop = self._loop = StepLoop(
            engine,
            feeder,
            self._writer,
            self._checkpoint.session,
            stop=self._stop,
            progress=self._progress,
            grace_s=self._job.grace,
            max_errors=self._job.max_errors,
        )
        session, path = self._checkpoint.session.number, self._setup.paths.trace
        try:
            with tracing(engine, path, session, self._progress.say) if self._job.trace else nullcontext():
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
        self._writer.write(row.index, partial(failed_entry, row, error, self._checkpoint.session))

    def _replay(self, row: JobRow) -> None:
        self._writer.replay(row)

    def _describe(self, engine: BatchEngine, defaults: dict[str, object]) -> None:
        """Say what was decided, and keep it in the journal for whoever finishes the job."""
        settings = engine.plan.settings()
        self._facts = {"load_s": engine.load_s, "settings": settings, "pid": os.getpid(), **reporting.environment()}
        self._facts |= {"generation_config": defaults, CLOCK: self._checkpoint.clock.isoformat()}
        if self._setup.engine.deterministic and self._num_recovered:
            check_same_bits(self._checkpoint.facts, self._facts)
        self._writer.note(self._checkpoint.session.number, self._facts)
        if self._verbose:
            for name, setting in settings.items():
                self._progress.say(f"{name} = {setting['value']} ({setting['reason']})")
        else:
            words = ", ".join(f"{name} {setting['value']}" for name, setting in settings.items())
            self._progress.say(f"loaded in {engine.load_s:.1f} s: {words}")
        if defaults:
            words = ", ".join(f"{name} {value}" for name, value in defaults.items())
            self._progress.say(f"from the model's generation config, where neither row nor option says: {words}")

    def _finish(self, reader: JobReader, surveyed: Survey | None, *, openai: bool) -> JobSummary:
        """Put the output and its report together."""
        check_errors(self._writer, self._job.max_errors)
        self._check_locks()
        ledger = self._checkpoint.ledger
        num_unused = len(ledger) - ledger.num_replayed - ledger.num_again
        if ledger.num_replayed and num_unused:
            journal = self._setup.paths.journal
            self._progress.say(f"{num_unused} finished rows in {journal} are not of this input with these settings")
        schema = self._setup.source.schema
        layout = Layout(
            self._setup.paths.output,
            self._job.order,
            self._words_asked(reader.asked if surveyed is None else surveyed.asked),
            self._job.keep_columns,
            schema if schema is not None or surveyed is None else surveyed.schema,
            frozenset(reader.colliding_names) if surveyed is None else surveyed.colliding_names,
            openai,
        )
        renamed = [f"{ours} as {written}" for ours, written in layout.names.items() if written != ours]
        if renamed and not openai:
            self._progress.say(f"columns of the input have names of ours, which are written {', '.join(renamed)}")
        ledger.forget()  # its memory is needed for the latencies
        is_new, report = finish(
            self._setup,
            self._checkpoint.journal,
            self._index,
            layout,
            reader.digest,
            self._session_figures(),
            self._part,
            self._stop.check,
        )
        if is_new:
            self._say_what_is_odd(report)
        tally = self._writer.tally
        failed = tally.num_errors > self._job.error_tolerance * tally.num_rows
        return self._summary("done" if is_new else "unchanged", EXIT_FAILED if failed else EXIT_OK, report)

    def _say_what_is_odd(self, report: dict[str, Any]) -> None:
        """Say what of the input is not in the output as it was, or as was meant."""
        if num_nulled := report["rows_nulled"]:
            self._progress.say(f"{num_nulled} rows hold numbers that JSON lacks (NaN, infinities): null in the output")
        for name in report["columns_not_found"]:
            self._progress.say(f"no row has the column {name} of --keep-columns")

    def _words_asked(self, by_rows: Collection[str]) -> frozenset[str]:
        """Which optional columns the output has: the same in every shard, and whatever rows were finished before."""
        words = {word for word in ROW_WORDS if self._job.sampling.get(word) is not None}
        words |= set(by_rows) if self._job.row_params else set()
        return frozenset(words | ({"return_token_ids"} if self._job.return_token_ids else set()))

    def _session_figures(self) -> SessionFigures:
        engine, tally = self._engine, self._writer.tally
        return SessionFigures(
            self._checkpoint.session.number,
            tally.num_rows,
            tally.num_replayed,
            self._began,
            self._started_at,
            load_s=engine.load_s if engine is not None else 0.0,
            stats=engine.stats if engine is not None else EngineStats(),
            ran_engine=engine is not None,
            output_wait_s=self._loop.output_wait_s if self._loop is not None else 0.0,
            facts=self._facts or reporting.environment(),
        )

    def _interrupted(self, reason: str) -> JobSummary:
        summary = self._summary("interrupted", self._job.interrupted_exit_code, {}, reason)
        return replace(summary, rows=max(summary.rows, self._num_recovered))

    def _summary(
        self,
        status: Literal["done", "unchanged", "interrupted"],
        exit_code: int,
        report: dict[str, Any],
        reason: str | None = None,
    ) -> JobSummary:
        tally = self._writer.tally
        return JobSummary(
            status,
            exit_code,
            self._setup.paths,
            tally.num_rows,
            tally.num_ok,
            tally.num_errors,
            tally.num_replayed,
            report,
            reason,
        )

    def _check_locks(self) -> None:
        for lock in self._locks:
            lock.check()

    def _stop_because_lock_lost(self) -> None:
        self._stop.reason = "the loss of its lock"
