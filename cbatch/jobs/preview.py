"""A job's rows as the engine would get them, without a job: no output, journal or lock. For commands that look ahead.

The same code as a run's reads, renders, checks and tokenises them, so what fails there fails here, in the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from cbatch.errors import RowError
from cbatch.jobs.encoding import ReadyRow, RowEncoder
from cbatch.jobs.ledger import Ledger
from cbatch.jobs.opening import RowSetup, open_rows
from cbatch.jobs.params import check_model_defaults
from cbatch.jobs.prompts import PromptEncoder, Tokenizer
from cbatch.jobs.reader import JobReader, JobRow


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that would end with an error before it came to the engine."""

    row: JobRow
    error: RowError


def preview_rows(
    setup: RowSetup, tokenizer: Tokenizer, generation_defaults: dict[str, object], max_model_len: int
) -> Iterator[ReadyRow | FailedRow]:
    """Read and encode the rows of a job, in input order, each once. Raises UsageError, InputError."""
    job = setup.job
    taken = generation_defaults if job.generation_config == "auto" else {}
    prompts = PromptEncoder(tokenizer, max_model_len, job.on_overlong, datetime.now())
    encoder = RowEncoder(prompts, check_model_defaults(taken), job.seed)
    opened = open_rows(setup, lambda: None)
    for row in JobReader(opened.rows, opened.interpret, Ledger(), identity=b""):
        try:
            yield encoder.encode(row)
        except RowError as error:
            yield FailedRow(row, error)
