"""One process's work on a search: the sample found or recalled, and trials run, or answered from the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from cbatch.config import EngineConfig
from cbatch.jobs.encoding import RowEncoder
from cbatch.jobs.keys import hash_text
from cbatch.jobs.params import check_model_defaults
from cbatch.jobs.prompts import PromptEncoder
from cbatch.jobs.report import environment
from cbatch.jobs.stop import Stop
from cbatch.tune.calibrate import Sample, calibrate, encode_rows, recall
from cbatch.tune.evidence import MODEL, machine_facts
from cbatch.tune.findings import spell
from cbatch.tune.journal import TrialJournal
from cbatch.tune.measure import EngineSource, run_trial
from cbatch.tune.rows import InputRows
from cbatch.tune.sample import count_runs, pick_rows
from cbatch.tune.space import Point, Space, build_space
from cbatch.tune.trial import Outcome, Trial, TrialBook

TRIALS_PER_BUDGET = 20  # of the whole sample: what exploring, halving and the rounds of the finalists add up to
TRIAL_S = 30.0  # of the whole sample, where no budget says
MIN_PICKED = 64  # rows that a sample may have, however few a batch takes
BATCHES = 2  # that the sample may fill
MORE_TIME = "a larger --budget, with --restart where the sample was found before,"
BATCH_LIMIT = "max_requests_per_batch"


class Session:
    """Answers trials; entered, it holds the journal. Ready once `prepare` was called."""

    space: Space
    sample: Sample

    def __init__(
        self,
        output: Path,
        rows: InputRows,
        engines: EngineSource,
        names: Sequence[str],
        config: EngineConfig,
        stop: Stop,
        say: Callable[[str], None],
        began: float,
    ) -> None:
        """`began` is when this process did, on the monotonic clock."""
        self._began = began
        self._path = output.with_name(f"{output.name}.journal.jsonl")
        self._rows = rows
        self._engines = engines
        self._names = names
        self._stop = stop
        self._say = say
        with stop.interruptible():
            self._plan = engines.plan({})
        self._machine = machine_facts(self._plan.settings())
        overlong = rows.job.on_overlong  # what rows are cut to is no part of their keys
        facts = [asdict(config), sorted(names), overlong, self._machine, environment()["versions"]]
        self._key = hash_text(f"{rows.model_identity.hex()} {rows.digest} {facts!r}").hex()

    def __enter__(self) -> Session:
        if self._rows.job.restart:
            self._path.unlink(missing_ok=True)
        self._journal = TrialJournal(self._path, self._key)
        if self._journal.num_trials:
            self._say(f"{self._journal.num_trials} trials found in {self._path}")
        return self

    def __exit__(self, *_exception: object) -> None:
        self._journal.close()

    def prepare(self, budget_s: float | None, now: datetime) -> None:
        """Find the sample, or recall that of an earlier process, and what can be searched over it."""
        whole = BATCH_LIMIT in self._names
        with self._stop.interruptible():
            recorded = self._journal.sample
            if recorded is not None:
                prompts, _ = self._encode([index for index, _ in recorded["rows"]], now)
                self.sample = recall(recorded, prompts, whole=whole)
            else:
                self.sample = self._calibrate(budget_s, now, whole=whole)
            self._engines.release()
            self.space = build_space(
                self._names,
                self._engines.plan,
                num_requests=self.sample.num_requests,
                num_tokens=self.sample.prompt_tokens,
            )
        self._describe_sample()

    def spent_s(self) -> float:
        """Count the seconds of this process, and those that earlier ones spent on what is in the journal."""
        return self._journal.earlier_s + time.monotonic() - self._began

    @property
    def known_points(self) -> list[Point]:
        """The configurations in the journal, in the order in which they were tried."""
        return [tuple(settings[name] for name in self._names) for settings in self._journal.settings]

    def has(self, point: Point, rung: int) -> bool:
        """Whether the journal has an outcome for the next trial of a configuration."""
        return self._journal.has(self._settings(point), rung)

    def measure(self, point: Point, rung: int) -> Outcome:
        """Answer a trial from the journal, or run it and write it there. Raises Interrupted."""
        settings = self._settings(point)
        if (known := self._journal.take(settings, rung)) is not None:
            return known
        self._stop.check()
        self._journal.note_start(settings, rung)
        try:
            with self._stop.interruptible():
                outcome = run_trial(self._engines, self.space.settings(point), self.sample.of(rung))
        except BaseException:
            self._journal.note_abandoned(settings, rung)
            raise
        self._journal.note_trial(settings, rung, outcome)
        return outcome

    def describe(self, trial: Trial, book: TrialBook) -> None:
        """Say what came of a trial."""
        outcome = trial.outcome
        name = "default" if trial.point == self.space.baseline else f"configuration {book.points.index(trial.point)}"
        rows = f"{self.sample.rungs[trial.rung]} rows"
        words = f"trial {len(book.trials)}, {name}: {spell(self._settings(trial.point))}; {rows}: "
        default = book.speeds(self.space.baseline, trial.rung)
        if not outcome.ok:
            words += f"failed, {outcome.reason}"
        else:
            words += f"{self.sample.speed(outcome):.1f} tokens/s"
            if default and trial.point != self.space.baseline:
                words += f", {outcome.processed_per_s / median(default) - 1:+.1%} against the default"
        self._say(words)

    def circumstances(self) -> dict[str, Any]:
        """Say what the trials were run on, for the evidence."""
        profile = self._rows.profile
        sample = {"of_rows": len(profile), "seed": self._rows.job.seed, "input_digest": self._rows.digest}
        return {MODEL: self._rows.model_identity.hex(), "machine": self._machine, "sample": sample}

    def _settings(self, point: Point) -> dict[str, Any]:
        return dict(zip(self._names, point, strict=True))

    def _calibrate(self, budget_s: float | None, now: datetime, *, whole: bool) -> Sample:
        began = self._engines.clock()
        most = max(MIN_PICKED, BATCHES * self._plan.max_requests_per_batch)
        picked = pick_rows(self._rows.profile, self._rows.job.seed, most)
        prompts, errors = self._encode(picked, now)
        self._say(f"finding the sample: up to {len(prompts)} of {len(self._rows.profile)} rows, as many as time allows")
        trial_s = TRIAL_S if budget_s is None else budget_s / TRIALS_PER_BUDGET
        sample = calibrate(self._engines, prompts, errors, trial_s, whole=whole)
        self._journal.note_sample(sample.record(), self._engines.clock() - began)
        return sample

    def _encode(self, picked: Sequence[int], now: datetime) -> tuple[list[Any], list[Any]]:
        """Encode rows as a run does."""
        job, plan = self._rows.job, self._plan
        prompts = PromptEncoder(self._engines.tokenizer, plan.max_model_len, job.on_overlong, now)
        defaults = check_model_defaults(self._engines.generation_defaults if job.generation_config == "auto" else {})
        return encode_rows(self._rows.fetch(picked), RowEncoder(prompts, defaults, job.seed))

    def _describe_sample(self) -> None:
        sample, rows = self.sample, self.sample.rows
        failed = f"; {sample.num_failed} cannot run, the first: {sample.first_error}" if sample.num_failed else ""
        self._say(
            f"the sample: {len(rows)} of {len(self._rows.profile)} rows in {count_runs(rows)} runs, "
            f"{sample.prompt_tokens} prompt tokens, {sample.output_tokens} output tokens, "
            f"trials of {', '.join(str(size) for size in sorted(set(sample.rungs)))} rows{failed}"
        )
        if sample.num_cut:
            self._say(f"the outputs of {sample.num_cut} rows are cut for want of time: {MORE_TIME} cuts less")
        places = self._plan.max_requests_per_batch
        if sample.num_requests < min(places, self._rows.profile.num_good):
            self._say(f"the sample does not fill a batch of {places}: {MORE_TIME} takes more rows")
        self._say(f"{len(self.space.points)} configurations of {', '.join(self._names)} fit")
