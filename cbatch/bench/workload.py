"""The rows that everybody runs: read, rendered and tokenised once, as a job does it, with as many tokens to generate.

Called before anything runs. All that a row asks for beyond its number of tokens is left out: everybody is greedy, and
no row ends early.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.config import DEFAULT_MAX_TOKENS
from cbatch.errors import InputError
from cbatch.jobs.opening import RowSetup
from cbatch.jobs.preview import FailedRow, preview_rows
from cbatch.jobs.prompts import Tokenizer


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of token ids and the number of tokens to generate, in input order."""

    rows: list[tuple[list[int], int]]
    num_left_out: int = 0
    first_error: str | None = None  # of the rows that are left out

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.rows)

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, its output included."""
        return max(len(ids) + count for ids, count in self.rows)


def read_workload(setup: RowSetup, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    """Read a job's rows; those that cannot run are left out. Raises UsageError, and InputError where none is left."""
    rows: list[tuple[list[int], int]] = []
    errors: list[str] = []
    for ready in preview_rows(setup, tokenizer, {}, max_model_len):
        if isinstance(ready, FailedRow):
            errors.append(ready.error.message)
            continue
        ids, wanted = ready.prompt.token_ids, ready.prompt.sampling.max_tokens
        count = min(DEFAULT_MAX_TOKENS, max_model_len - len(ids)) if wanted is None else wanted
        if count > 0:
            rows.append((ids, count))
        else:
            errors.append(f"{ready.row.row.location}: max_tokens is 0, so there is nothing to time")
    if not rows:
        raise InputError(f"none of {len(errors)} rows can run; the first: {errors[0]}" if errors else "no rows to run")
    return Workload(rows, len(errors), errors[0] if errors else None)
