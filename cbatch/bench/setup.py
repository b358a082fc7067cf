"""A comparison before it begins: the rows read, and settled what everybody has in common. Called by the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cbatch.bench.contest import Contest
from cbatch.bench.workload import read_workload
from cbatch.config import EngineConfig, JobConfig
from cbatch.engine.plan import check_config
from cbatch.io.atomic import check_target
from cbatch.jobs.opening import prepare_rows
from cbatch.jobs.totals import Targets
from cbatch.models.inspect import inspect_model
from cbatch.models.outline import outline_model


def prepare_contest(
    job: JobConfig, engine: EngineConfig, output: str | None, config: str | None, *, verbose: bool = False
) -> Contest:
    """Check where the figures go, which is none of the files that are read, such as `config`, and read the rows.

    Contexts are as long as the longest row needs, unless a length is given.

    Drafts are off unless asked for: they help the smallest batches most, and the modes would differ by them too.
    Raises UsageError, InputError, OutputError.
    """
    setup = prepare_rows(replace(job, generation_config="none"))
    if output is not None:
        read = dict.fromkeys(setup.source.inputs, "the input")
        check_target(Path(output), read | ({config: "the configuration"} if config is not None else {}))
    shape = inspect_model(engine)
    check_config(engine, shape)
    outline = outline_model(engine, shape)
    workload = read_workload(setup, outline.tokenizer, engine.max_model_len or shape.context_length)
    return Contest(
        workload,
        replace(
            engine,
            max_model_len=engine.max_model_len or workload.longest,
            speculation=engine.speculation or False,
        ),
        dtype=str(outline.dtype).removeprefix("torch."),
        device=str(outline.device),
        num_threads=outline.num_threads,
        targets=Targets(job.goodput_ttft, job.goodput_itl),
        verbose=verbose,
    )
