"""Chooses the next tokens of all sampling requests of a step at once.

From a row of logits to its token, in this order, each step only where the request asks for it:

    1  repetition_penalty (tokens of prompt and output), then presence_penalty and frequency_penalty (of the output)
    2  logit_bias
    3  min_tokens: what would end the completion is forbidden
    4  structured output: what its grammar does not take is forbidden
    5  temperature 0 or top_k 1: the likeliest token, the first of equals, and nothing more
    6  logits / temperature → probabilities
    7  top_k, then top_p of what that leaves; min_p of all; a token stays that passes all three
    8  one uniform number, inverted through the cumulative distribution

From the fifth step on `cbatch_kernels.draw_tokens` does it, in one launch where there is a GPU.
A request's random stream depends on its seed and the position alone: the number comes from hashing both. Batch, order
and scheduling do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cbatch_kernels import dispatch
from cbatch_kernels.draw_tokens import DrawRules
from cbatch_kernels.upload import to_device
from torch import Tensor

from cbatch.config import SamplingParams
from cbatch.engine.edits import LogitEdits
from cbatch.engine.request import NextToken
from cbatch.engine.samples import sample_seed
from cbatch.errors import RowError


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How those of R rows of logits are sampled that do not just take the likeliest token."""

    rows: npt.NDArray[np.int64]  # which n of the R
    rules: DrawRules
    edits: LogitEdits | None = None

    @classmethod
    def build(cls, tokens: Sequence[NextToken]) -> SamplingBatch:
        """Collect what is asked of R tokens. Brings the histories of their requests up to date."""
        rows = [row for row, token in enumerate(tokens) if not _takes_likeliest(token)]
        asking = [tokens[row] for row in rows]
        requests = [token.request for token in asking]
        params = [request.prompt.sampling for request in requests]
        seeds = [sample_seed(request.prompt.sampling.seed, request.sample) % 2**64 for request in requests]
        positions = np.array([token.position for token in asking], dtype=np.uint64)
        return cls(
            rows=np.array(rows, dtype=np.int64),
            rules=DrawRules(
                temperature=np.array([_temperature(p) for p in params], dtype=np.float32),
                top_p=np.array([p.top_p for p in params], dtype=np.float32),
                top_k=np.array([p.top_k for p in params], dtype=np.int64),
                min_p=np.array([p.min_p for p in params], dtype=np.float32),
                uniform=uniform_numbers(np.array(seeds, dtype=np.uint64), positions),
            ),
            edits=LogitEdits.build(asking),
        )

    def errors(self) -> dict[int, RowError]:
        """Say for which of the R rows no token can be found, and why."""
        if self.edits is None or self.edits.constraints is None:
            return {}
        return {int(self.rows[row]): error for row, error in self.edits.constraints.errors().items()}


def _takes_likeliest(token: NextToken) -> bool:
    request = token.request
    params = request.prompt.sampling
    if _temperature(params) or params.logit_bias or request.history is not None or request.constraint is not None:
        return False
    return not (params.min_tokens and token.must_go_on)


def _temperature(params: SamplingParams) -> float:
    """Of one token there is nothing to draw, though others have its logit, as in bfloat16 they often have."""
    return 0.0 if params.top_k == 1 else params.temperature


def uniform_numbers(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Hash seeds and positions (uint64 [R]) to numbers in [0, 1), by SplitMix64 (Steele et al., OOPSLA 2014)."""
    bits = _split_mix(_split_mix(seeds) ^ positions) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _split_mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Choose a token per row of `logits` [R, vocab], which stay as they are → int64 [R]."""
    if not len(batch.rows):
        return logits.argmax(dim=-1)
    if batch.edits is None:
        return dispatch.draw_tokens(logits, batch.rules.spread(batch.rows, len(logits)))
    tokens = logits.argmax(dim=-1)
    index = to_device(batch.rows, logits.device)
    edited = logits[index].float()  # indexing copies
    batch.edits.apply(edited)
    tokens[index] = dispatch.draw_tokens(edited, batch.rules)
    return tokens
