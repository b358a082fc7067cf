"""What a job will be, found out without its model: rows, tokens, prefixes, memory, time. Called by `cbatch plan`.

Rows are read once: each is checked and tokenised as a run does it, counted, compared with those before it, and handed
to the real engine with nothing behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from cbatch.config import DEFAULT_MAX_TOKENS, EngineConfig, JobConfig
from cbatch.engine.engine import plan_over
from cbatch.engine.plan import EnginePlan, check_config
from cbatch.engine.request import Prompt
from cbatch.engine.stats import EngineStats
from cbatch.errors import DoesNotFitError, RowError
from cbatch.jobs.opening import RowSetup, prepare_rows
from cbatch.jobs.preview import FailedRow, preview_rows
from cbatch.jobs.survey import can_reread
from cbatch.jobs.totals import count_error
from cbatch.models.inspect import inspect_model
from cbatch.models.memory import FreeMemory, free_memory
from cbatch.models.outline import ModelOutline, outline_model
from cbatch.models.patch import packed_bytes
from cbatch.models.source import resolve_source
from cbatch.models.weights import weight_bytes
from cbatch.planning import fields
from cbatch.planning.dryrun import DryRun, without_endings
from cbatch.planning.duration import Estimate, Rates, Work, estimate, load_rates
from cbatch.planning.lengths import Lengths
from cbatch.planning.prefixes import PrefixTree

MAX_SHOWN_ERRORS = 10
DRY_TOKENS = 4_000_000  # of prompts and outputs: rows beyond are counted, but not run dry


@dataclass(frozen=True, slots=True)
class ShownError:
    """A row that will fail."""

    row: int
    code: str
    message: str


@dataclass(slots=True)
class RowCounts:
    """What the rows come to."""

    num_ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by code
    shown: list[ShownError] = field(default_factory=list)  # the first ones
    lengths: Lengths = field(default_factory=Lengths)
    shareable_tokens: int = 0  # that an earlier prompt begins with too
    num_truncated: int = 0

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    @property
    def num_rows(self) -> int:
        return self.num_ok + self.num_errors

    def fail(self, index: int, error: RowError) -> None:
        """Take a row that cannot run."""
        count_error(self.errors, error.code)
        if len(self.shown) < MAX_SHOWN_ERRORS:
            self.shown.append(ShownError(index, error.code, str(error)))


@dataclass(frozen=True, slots=True)
class DryCounts:
    """What the dry run came to; of the first rows only where all would have taken too long."""

    num_rows: int
    stats: EngineStats
    step_s: float | None  # what its steps would have taken


@dataclass(frozen=True, slots=True)
class JobPlan:
    """All that is known of a job before it runs."""

    job: JobConfig
    config: EngineConfig
    outline: ModelOutline
    weights: int | None  # bytes; None where no header says
    memory: FreeMemory  # before the weights are in
    plan: EnginePlan | None  # None where it does not fit, for the reason `misfit`
    misfit: DoesNotFitError | None
    rows: RowCounts
    tree: PrefixTree
    dry: DryCounts | None
    estimate: Estimate | None
    advice: fields.Advice | None

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or self.outline.shape.context_length


def plan_job(job: JobConfig, config: EngineConfig, calibration: str | None, tick: Callable[[], None]) -> JobPlan:
    """Look at a whole job; `tick` is called for every row. Raises UsageError, InputError."""
    rates = load_rates(calibration) if calibration is not None else None
    setup = prepare_rows(job)
    shape = inspect_model(config)
    check_config(config, shape)
    outline = outline_model(config, shape)
    source = resolve_source(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    memory = free_memory(outline.device)
    if (weights := weight_bytes(source, outline.dtype)) is not None:
        weights = packed_bytes(weights, shape, outline.dtype, outline.device)
    plan, misfit = _plan_engine(config, outline, replace(memory, num_bytes=max(0, memory.num_bytes - (weights or 0))))
    look = _Look(setup, config, outline, plan, rates)
    look.run(tick)
    return JobPlan(
        job=job,
        config=config,
        outline=outline,
        weights=weights,
        memory=memory,
        plan=plan,
        misfit=misfit,
        rows=look.rows,
        tree=look.tree,
        dry=look.dry,
        estimate=_estimate(rates, look, config, outline),
        advice=_advise(setup, outline, config),
    )


def _plan_engine(
    config: EngineConfig, outline: ModelOutline, memory: FreeMemory
) -> tuple[EnginePlan | None, DoesNotFitError | None]:
    """Decide the plan as the engine will, the weights taken off the memory."""
    try:
        return plan_over(outline, config, memory=memory), None
    except DoesNotFitError as error:
        return None, error


class _Look:
    """One pass over the rows."""

    def __init__(
        self,
        setup: RowSetup,
        config: EngineConfig,
        outline: ModelOutline,
        plan: EnginePlan | None,
        rates: Rates | None,
    ) -> None:
        self.rows = RowCounts()
        self.tree = PrefixTree()
        self._max_model_len = config.max_model_len or outline.shape.context_length
        defaults = outline.generation_defaults
        self._ready = preview_rows(setup, outline.tokenizer, defaults, self._max_model_len)
        self._dry_run = None
        if plan is not None:
            self._dry_run = DryRun(config, plan, outline, rates.cost if rates is not None else None)
        self._dry_rows = 0
        self._dry_tokens = 0

    def run(self, tick: Callable[[], None]) -> None:
        """Read all rows, the first of them through the engine."""
        prompts = self._prompts(tick)
        if self._dry_run is not None:
            for _ in self._dry_run.engine.generate(self._limited(prompts)):
                pass
        for _ in prompts:
            pass

    @property
    def dry(self) -> DryCounts | None:
        run = self._dry_run
        if run is None:
            return None
        return DryCounts(self._dry_rows, run.engine.stats, run.runner.seconds if run.runner.cost is not None else None)

    def _limited(self, prompts: Iterator[tuple[Prompt, int]]) -> Iterator[Prompt]:
        """Give as many prompts as a dry run is to take."""
        while self._dry_tokens < DRY_TOKENS and (item := next(prompts, None)) is not None:
            prompt, num_tokens = item
            self._dry_tokens += num_tokens
            self._dry_rows += 1
            yield without_endings(prompt)

    def _prompts(self, tick: Callable[[], None]) -> Iterator[tuple[Prompt, int]]:
        """Check and count every row; give those that can run, with the tokens that they have and may get."""
        for ready in self._ready:
            tick()
            if isinstance(ready, FailedRow):
                self.rows.fail(ready.row.index, ready.error)
                continue
            prompt = ready.prompt
            try:
                outputs = self._outputs(prompt)
            except RowError as error:
                located = RowError(error.code, f"{ready.row.row.location}: {error.message}")
                self.rows.fail(ready.row.index, located)
                continue
            num_prompt = len(prompt.token_ids)
            self.rows.num_ok += 1
            self.rows.num_truncated += ready.num_dropped > 0
            self.rows.lengths.add(num_prompt, outputs)
            self.rows.shareable_tokens += min(self.tree.add(prompt.token_ids), num_prompt - 1)
            yield prompt, num_prompt + sum(outputs)

    def _outputs(self, prompt: Prompt) -> list[int]:
        """Count the tokens that each of a prompt's samples may get. Raises RowError where it cannot run."""
        if self._dry_run is not None:
            return self._dry_run.engine.check(prompt)
        asked = prompt.sampling.max_tokens
        room = self._max_model_len - len(prompt.token_ids)
        return [min(DEFAULT_MAX_TOKENS, room) if asked is None else asked] * prompt.sampling.n


def _estimate(rates: Rates | None, look: _Look, config: EngineConfig, outline: ModelOutline) -> Estimate | None:
    dry, rows = look.dry, look.rows
    if rates is None or dry is None or dry.num_rows == 0:
        return None
    share = rows.num_ok / dry.num_rows  # of rows that were run dry, so many times
    work = Work(
        rows=rows.num_ok,
        prompt_tokens=sum(rows.lengths.prompts),
        computed_tokens=dry.stats.computed_tokens * share,
        output_tokens=sum(rows.lengths.outputs),
        step_s=None if dry.step_s is None else dry.step_s * share,
    )
    dtype = str(outline.dtype).removeprefix("torch.")
    return estimate(rates, work, {"model": config.model, "dtype": dtype, "device": str(outline.device)})


def _advise(setup: RowSetup, outline: ModelOutline, config: EngineConfig) -> fields.Advice | None:
    """Try other orders of the template's fields on the first rows, where they can be read again."""
    job = setup.job
    if job.template is None or not can_reread(setup.source):
        return None
    limit = min(job.limit or fields.MAX_ROWS, fields.MAX_ROWS)
    max_model_len = config.max_model_len or outline.shape.context_length

    def encode(template: str) -> Iterator[list[int]]:
        changed = prepare_rows(replace(job, template=template, limit=limit))
        for ready in preview_rows(changed, outline.tokenizer, {}, max_model_len):
            if not isinstance(ready, FailedRow):
                yield ready.prompt.token_ids

    columns = [row.columns for row in islice(setup.source, limit) if row.error is None]
    return fields.advise(job.template, columns, encode)
