"""Chooses the next tokens of all sampling requests of a step at once.

From a row of logits to its token, in this order, each step only where the request asks for it:

    1  repetition_penalty (tokens of prompt and output), then presence_penalty and frequency_penalty (of the output)
    2  logit_bias
    3  min_tokens: what would end the completion is forbidden
    4  structured output: what its grammar does not take is forbidden
    5  temperature 0: the likeliest token, and nothing more
    6  logits / temperature → probabilities
    7  top_k, then top_p of what that leaves; min_p of all; a token stays that passes all three
    8  one uniform number, inverted through the cumulative distribution

A request's random stream depends on its seed and the position alone: the number comes from hashing both. Batch, order
and scheduling do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbatch.engine.edits import LogitEdits
from cbatch.engine.request import NextToken
from cbatch.engine.samples import sample_seed
from cbatch.errors import RowError

MAX_DRAWN = 2**19  # logits that are drawn from at a time: what drawing takes beside them stays within 30 MB


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How those of R rows of logits are sampled that do not just take the likeliest token; host arrays [n]."""

    rows: npt.NDArray[np.int64]  # which of the R
    temperature: npt.NDArray[np.float32]  # 0 is greedy
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]  # 0 keeps all
    min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]  # in [0, 1)
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
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            uniform=uniform_numbers(np.array(seeds, dtype=np.uint64), positions),
            edits=LogitEdits.build(asking),
        )

    def errors(self) -> dict[int, RowError]:
        """Say for which of the R rows no token can be found, and why."""
        if self.edits is None or self.edits.constraints is None:
            return {}
        return {int(self.rows[row]): error for row, error in self.edits.constraints.errors().items()}


def _takes_likeliest(token: NextToken) -> bool:
    request, params = token.request, token.request.prompt.sampling
    is_edited = request.history is not None or request.constraint is not None or params.logit_bias
    return params.temperature == 0 and not is_edited and not token.must_go_on


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
    tokens = logits.argmax(dim=-1)
    if len(batch.rows):
        index = torch.from_numpy(batch.rows).to(logits.device)
        # Indexing copies, and so does float where it converts: what follows may write.
        tokens[index] = _choose(logits[index].float(), batch)
    return tokens


def _choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Choose a token per row of the batch: logits float32 [n, vocab], changed in place → int64 [n]."""
    if batch.edits is not None:
        batch.edits.apply(logits)
    drawn = np.flatnonzero(batch.temperature > 0)
    tokens = logits.argmax(dim=-1)
    most = max(1, MAX_DRAWN // logits.shape[-1])
    for start in range(0, len(drawn), most):
        rows = drawn[start : start + most]
        index = torch.from_numpy(rows).to(logits.device)
        tokens[index] = _draw(logits[index], batch, rows)
    return tokens


def _draw(logits: Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64]) -> Tensor:
    """Draw from the truncated distributions of the batch's `rows`: logits float32 [m, vocab] → int64 [m]."""
    device, vocab = logits.device, logits.shape[-1]
    temperature = torch.from_numpy(batch.temperature[rows]).to(device)[:, None]
    # Below the best one, so that the lowest temperature leaves that finite.
    probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature, dim=-1)
    top_k = np.where(batch.top_k[rows] > 0, np.minimum(batch.top_k[rows], vocab), vocab)
    truncated = np.flatnonzero((top_k < vocab) | (batch.top_p[rows] < 1))
    if len(truncated):
        index = torch.from_numpy(truncated).to(device)
        least = _least_kept(probs[index], top_k[truncated], batch.top_p[rows][truncated])
        # By value, in the vocabulary's order: how equals are sorted, and for how many rows, does not enter.
        probs[index] = probs[index].masked_fill(probs[index] < least, 0.0)
    if (batch.min_p[rows] > 0).any():
        share = torch.from_numpy(batch.min_p[rows].astype(np.float64)).to(device)[:, None]
        probs = probs.masked_fill_(probs < share * probs.amax(dim=-1, keepdim=True), 0.0)
    cumulative = probs.cumsum(dim=-1)
    target = torch.from_numpy(batch.uniform[rows]).to(device)[:, None] * cumulative[:, -1:]
    # From the right, so that a token of probability 0 is never chosen.
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = vocab - 1 - (probs > 0).int().flip(-1).argmax(dim=-1)
    return torch.minimum(chosen, last)


def _least_kept(probs: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> Tensor:
    """Find per row of `probs` [n, vocab] the smallest probability that top-k, then top-p of the rest, keep: [n, 1]."""
    best = probs.topk(int(top_k.max()), dim=-1).values
    ranks = torch.arange(best.shape[-1], device=probs.device)
    kept = ranks < torch.from_numpy(top_k).to(probs.device)[:, None]
    share = best.masked_fill(~kept, 0.0)
    share = share / share.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    # A token stays while those above it have not reached top_p; the best one always does.
    limit = torch.from_numpy(top_p.astype(np.float64)).to(probs.device)[:, None]
    kept &= (before < limit) | (ranks == 0)
    return best.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
