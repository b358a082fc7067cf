"""What is done to logits before a token is chosen from them: penalties, biases, tokens that are not allowed.

Called by the sampler for the rows that ask for any of it. The edits of a step are lists of single logits (row, token),
so that they cost what the requests' texts are long, not what the vocabulary is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from cbatch_kernels.upload import to_device
from torch import Tensor

from cbatch.engine.grammar import Allowed
from cbatch.engine.request import NextToken
from cbatch.errors import RowError

MAX_LOGIT = float(np.finfo(np.float32).max)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Places:
    """Logits by row and token; host arrays of one length."""

    rows: Ints
    token_ids: Ints

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return to_device(self.rows, device), to_device(self.token_ids, device)


@dataclass(frozen=True, slots=True)
class ConstraintMasks:
    """The tokens that structured outputs allow, for some of the rows."""

    rows: list[int]
    ending: list[frozenset[int]]  # of each of these rows, tokens that may not come yet unless nothing else may
    allowed: Future[Allowed]

    @classmethod
    def build(cls, tokens: Sequence[NextToken]) -> ConstraintMasks | None:
        """Bring the constraints up to date and begin to fill their masks; None where there are none."""
        rows, ending, asked = [], [], []
        for row, token in enumerate(tokens):
            request, constraint = token.request, token.request.constraint
            if constraint is None:
                continue
            constraint.catch_up(request.token_ids[request.num_prompt_tokens :])
            rows.append(row)
            ending.append(request.stopping.ending_token_ids if token.must_go_on else frozenset())
            asked.append((constraint, token.drafts))
        if not asked:
            return None
        return cls(rows, ending, asked[0][0].grammars.start_masks(asked))

    def errors(self) -> dict[int, RowError]:
        """Say for which rows no token can be found, and why; waits for the masks."""
        found = zip(self.rows, self.allowed.result().errors, strict=True)
        return {row: error for row, error in found if error is not None}

    def apply(self, logits: Tensor) -> None:
        """Forbid what is not allowed, in place; waits for the masks."""
        masks = self.allowed.result().masks
        for row, ending in enumerate(self.ending):
            tokens = np.array(sorted(ending), dtype=np.int64)
            going_on = masks[row].copy()
            np.bitwise_and.at(going_on, tokens // 8, ~(1 << tokens % 8).astype(np.uint8))
            masks[row] = going_on if going_on.any() else masks[row]
        bits = to_device(masks, logits.device)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
        rows = to_device(np.array(self.rows, dtype=np.int64), logits.device)
        logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of n rows of logits, in the order in which they are made."""

    seen: Places  # distinct tokens of the texts of rows with penalties
    repetition: Floats  # of each of them: what divides its logit where positive, and multiplies it where negative
    penalty: Floats  # of each of them: what is taken off then
    biased: Places
    bias: Floats
    forbidden: Places
    constraints: ConstraintMasks | None

    @classmethod
    def build(cls, tokens: Sequence[NextToken]) -> LogitEdits | None:
        """Collect what is asked of the tokens, one a row; None where that is nothing. Brings histories up to date."""
        histories = [(row, token) for row, token in enumerate(tokens) if token.request.history is not None]
        biases = ((row, token.request.prompt.sampling.logit_bias) for row, token in enumerate(tokens))
        biased = [(row, bias) for row, bias in biases if bias]
        forbidden = [
            (row, token.request.stopping.ending_token_ids)
            for row, token in enumerate(tokens)
            if token.must_go_on and token.request.constraint is None
        ]
        constraints = ConstraintMasks.build(tokens)
        if not (histories or biased or forbidden or constraints):
            return None
        seen, repetition, penalty = _penalties(histories)
        return cls(
            seen=seen,
            repetition=repetition,
            penalty=penalty,
            biased=_places((row, [token_id for token_id, _ in bias]) for row, bias in biased),
            bias=np.array([value for _, bias in biased for _, value in bias], dtype=np.float32),
            forbidden=_places(forbidden),
            constraints=constraints,
        )

    def apply(self, logits: Tensor) -> None:
        """Change float32 logits [n, vocab] in place."""
        device = logits.device
        if len(self.seen.rows):
            where = self.seen.on(device)
            repetition = to_device(self.repetition, device)
            values = logits[where]
            values = torch.where(values > 0, values / repetition, values * repetition)
            # A tiny divisor makes them infinite, and between infinities there is no distance to sample by.
            values = values.clamp(-MAX_LOGIT, MAX_LOGIT)
            logits[where] = values - to_device(self.penalty, device)
        if len(self.biased.rows):
            where = self.biased.on(device)
            logits[where] = logits[where] + to_device(self.bias, device)
        if len(self.forbidden.rows):
            logits[self.forbidden.on(device)] = float("-inf")
        if self.constraints is not None:
            self.constraints.apply(logits)


def _penalties(histories: Sequence[tuple[int, NextToken]]) -> tuple[Places, Floats, Floats]:
    if not histories:
        return _places(()), np.empty(0, np.float32), np.empty(0, np.float32)
    token_ids, counts = [], []
    for _, (request, drafts) in histories:
        assert request.history is not None
        request.history.catch_up(request.token_ids)
        distinct, generated = request.history.behind(drafts)
        token_ids.append(np.array(distinct))
        counts.append(np.array(generated))
    params = [token.request.prompt.sampling for _, token in histories]
    lens = [len(ids) for ids in token_ids]
    repeated = np.concatenate(counts)
    repetition = np.repeat(np.array([p.repetition_penalty for p in params], np.float32), lens)
    presence = np.repeat(np.array([p.presence_penalty for p in params], np.float32), lens)
    frequency = np.repeat(np.array([p.frequency_penalty for p in params], np.float32), lens)
    seen = Places(np.repeat(np.array([row for row, _ in histories]), lens), np.concatenate(token_ids))
    penalty = (repeated > 0) * presence + repeated * frequency
    return seen, repetition, penalty.astype(np.float32)


def _places(rows: Iterable[tuple[int, Iterable[int]]]) -> Places:
    pairs = [(row, token_id) for row, token_ids in rows for token_id in token_ids]
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Places(np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1]))
