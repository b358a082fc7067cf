"""Where a job's rows come from and how they are read: from the options to rows that can be interpreted.

Called by `setup` and `run`, and by commands that look at a job's rows without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from cbatch.compatibility import Facts, check
from cbatch.config import JobConfig
from cbatch.engine.grammar import INSTALL_HINT, is_installed
from cbatch.errors import UsageError
from cbatch.io.rows import Row
from cbatch.io.sources import FilePart, Source, open_source
from cbatch.jobs.openai import BatchRequests, is_batch_row
from cbatch.jobs.params import STRUCTURES, ParamReader
from cbatch.jobs.reader import Interpret, plain_rows
from cbatch.jobs.rendering import Renderer
from cbatch.jobs.survey import can_reread, check_custom_ids

CSV_SUFFIX = ".csv"
MAX_UNREADABLE = 1000  # rows that are kept while one is looked for that can be read


@dataclass(frozen=True, slots=True)
class RowSetup:
    """A job's input, found and checked."""

    job: JobConfig
    source: Source
    params: ParamReader
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The rows of an input, read from the start, and what they are."""

    rows: Iterator[Row]
    interpret: Interpret
    openai: bool  # whether they are the requests of an OpenAI Batch file


def prepare_rows(job: JobConfig, leave_out: Callable[[str], bool] = lambda _name: False) -> RowSetup:
    """Check what a job says of its rows, and find them; `leave_out` as in `open_source`.

    Raises UsageError, InputError.
    """
    renderer = Renderer(job.prompt_column, job.template, job.system_prompt)
    ParamReader(job.sampling)  # a wrong option is said before the input is looked at
    if any(job.sampling.get(name) for name in STRUCTURES) and not is_installed():
        raise UsageError("structured output needs the package llguidance", hint=INSTALL_HINT)
    source = open_source(job.inputs, split=job.dataset_split, leave_out=leave_out)
    has_text = any(isinstance(part, FilePart) and CSV_SUFFIX in part.format.suffixes for part in source.parts)
    params = ParamReader(job.sampling, row_params=job.row_params, text_values=has_text)
    return RowSetup(job, source, params, renderer)


def open_rows(setup: RowSetup, tick: Callable[[], None]) -> OpenRows:
    """Open the input. An OpenAI Batch file is told by its first row that can be read, and its ids are checked.

    `tick` is called for every row that is looked at. Raises UsageError, InputError.
    """
    job, source = setup.job, setup.source
    rows = islice(source, job.limit)
    ahead: list[Row] = []
    for row in rows:
        ahead.append(row)
        if row.error is None or len(ahead) == MAX_UNREADABLE:
            break
    explicit = job.prompt_column is not None or job.template is not None
    rest = chain(ahead, rows)
    if explicit or not ahead or not is_batch_row(ahead[-1].columns):
        return OpenRows(rest, plain_rows(setup.params, setup.renderer), openai=False)
    check(Facts(openai_batch=True, input_once=not can_reread(source)))
    check_custom_ids(islice(source, job.limit), tick)
    return OpenRows(rest, BatchRequests(setup.params, job.system_prompt).interpret, openai=True)
