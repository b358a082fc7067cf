"""Scores tokens by the model's own distribution: before temperature, penalties and everything else that sampling does.

Called by the model runner for the rows that ask. What comes of it is added to the requests' records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cbatch_kernels.upload import to_device
from torch import Tensor

from cbatch.engine.record import LogprobRecord
from cbatch.engine.request import NextToken, Request

MAX_SCORED = 2**21  # logits that are scored at a time, which bounds what that takes beside them


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Positions of a prompt whose logits a step computes, each to score the token after it."""

    request: Request
    first: int
    count: int

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt.token_ids[self.first + 1 : self.first + 1 + self.count]


def part_of_prompt(request: Request, start: int, stop: int) -> PromptPart | None:
    """Tell what a step that computes the positions from `start` to `stop` adds to the scores of a prompt."""
    if request.logprobs is None or not request.scores_prompt:
        return None
    first = request.logprobs.num_scored
    assert start <= first, "what was found in the cache has no logits"
    count = min(stop, request.num_prompt_tokens - 1) - first
    return PromptPart(request, first, count) if count > 0 else None


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """What a step scores: chosen tokens of some of its R sampling rows, and the prompt parts in the rows behind."""

    rows: list[int]  # which of the R
    records: list[LogprobRecord]  # theirs
    parts: list[PromptPart]

    @classmethod
    def build(cls, tokens: Sequence[NextToken], parts: list[PromptPart]) -> ScoringBatch | None:
        """Collect who asks for scores; None where nobody does."""
        asking = [
            (row, record)
            for row, record in enumerate(token.request.logprobs for token in tokens)
            if record is not None and record.num_top is not None
        ]
        if not (asking or parts):
            return None
        return cls([row for row, _ in asking], [record for _, record in asking], parts)

    def score(self, logits: Tensor, tokens: Tensor, num_tokens: int) -> list[Tensor]:
        """Score by logits [R + the parts' rows, vocab] the chosen `tokens` [R] and the prompts' own, on the device.

        The likeliest ones are among the first `num_tokens` ids. Gives log-probabilities [n], and ids and
        log-probabilities of the likeliest [n, top].
        """
        num_in_parts = sum(part.count for part in self.parts)
        wanted = np.array([*self.rows, *range(len(tokens), len(tokens) + num_in_parts)], dtype=np.int64)
        prompts = np.array([token_id for part in self.parts for token_id in part.token_ids], dtype=np.int64)
        rows = to_device(wanted, logits.device)
        token_ids = torch.cat([tokens[rows[: len(self.rows)]], to_device(prompts, logits.device)])
        most, num_top = max(1, MAX_SCORED // logits.shape[-1]), self._num_top()
        pieces = [
            _score(logits[rows[start : start + most]], token_ids[start : start + most], num_top, num_tokens)
            for start in range(0, len(rows), most)
        ]
        return [torch.cat(column) for column in zip(*pieces, strict=True)]

    def book(self, scores: Sequence[Tensor], counted: Collection[int]) -> None:
        """Add scores to the records. Of the R rows those `counted` are: others lie behind drafts that were wrong, say.

        Only now, when nothing can fail any more: a step that runs out of memory runs again.
        """
        chosen, ids, values = (column.tolist() for column in scores)
        scored = ((chosen[i], list(zip(ids[i], values[i], strict=True))) for i in range(len(chosen)))
        for row, record in zip(self.rows, self.records, strict=True):
            logprob, top = next(scored)
            if row in counted:
                record.add_generated(logprob, top)
        for part in self.parts:
            assert part.request.logprobs is not None
            for _ in range(part.count):
                part.request.logprobs.add_prompt(*next(scored))

    def _num_top(self) -> int:
        wanted = [record.num_top for record in self.records]
        wanted += [part.request.logprobs.num_prompt_top for part in self.parts if part.request.logprobs is not None]
        return max(count or 0 for count in wanted)


def _score(logits: Tensor, token_ids: Tensor, num_top: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give the log-probability of one token per row of logits [n, vocab], and the likeliest ones with theirs."""
    logits = logits.float()
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = (logits.gather(-1, token_ids[:, None]) - total)[:, 0]
    top = logits[:, :num_tokens].topk(num_top, dim=-1)
    return chosen, top.indices, top.values - total
