"""What a job is before it begins: every option checked, inputs found, outputs known to be writable. Called by `run`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cbatch.compatibility import Facts, check
from cbatch.config import EngineConfig, JobConfig
from cbatch.io.atomic import writing
from cbatch.jobs.identity import identify_model
from cbatch.jobs.keys import hash_text, job_identity
from cbatch.jobs.opening import RowSetup, prepare_rows
from cbatch.jobs.paths import JobPaths
from cbatch.jobs.shards import Shard, parse_shard, parts_folder
from cbatch.jobs.survey import can_reread


@dataclass(frozen=True, slots=True)
class JobSetup(RowSetup):
    """A job that can begin."""

    engine: EngineConfig
    paths: JobPaths
    shard: Shard | None
    model_identity: bytes

    @property
    def identity(self) -> bytes:
        """What all rows have in common and their answers depend on, hashed."""
        return job_identity(self.model_identity, self.job.generation_config, self.job.seed)

    def job_digest(self, rows: bytes) -> str:
        """Hash what must be the same for parts to make one output: the input's `rows`, settings and model."""
        job = self.job
        settings = (job.sampling, job.prompt_column, job.template, job.system_prompt, job.row_params, self.fit)
        return hash_text(f"{self.identity.hex()} {rows.hex()} {settings!r}").hex()

    @property
    def fit(self) -> str:
        """How prompts are made to fit the context, as far as that is known before the model is."""
        return f"{self.job.on_overlong} {self.engine.max_model_len}"


def prepare(job: JobConfig, engine: EngineConfig) -> JobSetup:
    """Check a job. Raises UsageError, InputError, OutputError."""
    rows = prepare_rows(job, leave_out=partial(_is_ours, job))
    source = rows.source
    shard = parse_shard(job.shard, os.environ) if job.shard is not None else None
    output = job.output
    if shard is not None:
        check(Facts(shard=True, input_once=not can_reread(source), completion_order=job.order == "completion"))
        part = shard.path(job.output)
        JobPaths.of(job.output).check(source.inputs)
        with writing(part.parent):
            part.parent.mkdir(exist_ok=True)
        output = str(part)
    paths = JobPaths.of(output, job.checkpoint_dir)
    paths.check(source.inputs)
    return JobSetup(job, source, rows.params, rows.renderer, engine, paths, shard, identify_model(engine))


def _is_ours(job: JobConfig, name: str) -> bool:
    """Whether a file is one that an earlier run of the job left: no pattern among its inputs means that."""
    paths, parts = JobPaths.of(job.output, job.checkpoint_dir), parts_folder(Path(job.output))
    if not paths.journal.exists() and not parts.exists():  # a file of the output's name is somebody else's
        return False
    return paths.holds(name) or Path(os.path.realpath(name)).is_relative_to(os.path.realpath(parts))
