"""From a row of a job to the prompt that the engine takes: tokenised, its parameters resolved.

Called by the feeder, on its thread, and by commands that look at a job without running it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.engine.request import Prompt
from cbatch.errors import RowError, UsageError
from cbatch.jobs.keys import row_seed
from cbatch.jobs.params import resolve
from cbatch.jobs.prompts import NO_CHAT_TEMPLATE, TEMPLATE_HINT, PromptEncoder
from cbatch.jobs.reader import JobRow


@dataclass(frozen=True, slots=True)
class ReadyRow:
    """A row with its prompt, ready for the engine."""

    row: JobRow
    prompt: Prompt
    num_dropped: int  # prompt tokens cut off to fit the context


class RowEncoder:
    """Encodes the rows of one job."""

    def __init__(self, encoder: PromptEncoder, defaults: dict[str, object], job_seed: int) -> None:
        """`defaults` are the model's sampling defaults, as far as they count."""
        self._encoder = encoder
        self._defaults = defaults
        self._job_seed = job_seed
        self._has_encoded = False

    def encode(self, row: JobRow) -> ReadyRow:
        """Make a row's prompt. Raises its RowError; UsageError where no chat of the job can work."""
        if row.error is not None:
            raise row.error
        assert row.rendered is not None
        max_tokens = row.given.get("max_tokens", self._defaults.get("max_tokens"))
        assert max_tokens is None or isinstance(max_tokens, int)
        try:
            encoded = self._encoder.encode(row.rendered, max_tokens)
        except RowError as error:
            if error.code == NO_CHAT_TEMPLATE and not self._has_encoded:
                raise UsageError(
                    f"{row.row.location} holds messages, and the model has no chat template", hint=TEMPLATE_HINT
                ) from None
            raise RowError(error.code, f"{row.row.location}: {error.message}") from error
        self._has_encoded = True
        sampling = resolve(row.given, self._defaults, row_seed(self._job_seed, row.claim.key))
        return ReadyRow(row, Prompt(row.index, encoded.token_ids, sampling), encoded.num_dropped)
