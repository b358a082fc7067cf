"""Chooses the next tokens of all sampling requests of a step at once.

A request's random stream depends on its seed and the position alone: one uniform number per token, made by hashing
both, then inverted through the cumulative distribution. Batch, order and scheduling do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbatch.engine.request import Request


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of R rows of logits is sampled; host arrays [R]."""

    temperature: npt.NDArray[np.float32]  # 0 is greedy
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]  # 0 keeps all
    uniform: npt.NDArray[np.float64]  # in [0, 1)

    @classmethod
    def build(cls, requests: Sequence[Request]) -> SamplingBatch:
        params = [request.prompt.sampling for request in requests]
        seeds = np.array([p.seed % 2**64 for p in params], dtype=np.uint64)
        positions = np.array([request.num_tokens for request in requests], dtype=np.uint64)
        return cls(
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            uniform=uniform_numbers(seeds, positions),
        )


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
    """Choose a token per row of `logits` [R, vocab] → int64 [R]."""
    tokens = logits.argmax(dim=-1)
    rows = np.flatnonzero(batch.temperature > 0)
    if len(rows):
        index = torch.from_numpy(rows).to(logits.device)
        tokens[index] = _sample_rows(logits[index].float(), batch, rows)
    return tokens


def _sample_rows(logits: Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64]) -> Tensor:
    """Draw from the truncated distributions of `rows`: logits float32 [n, vocab] → int64 [n]."""
    device, vocab = logits.device, logits.shape[-1]
    logits = logits / torch.from_numpy(batch.temperature[rows]).to(device)[:, None]
    top_k = np.where(batch.top_k[rows] > 0, np.minimum(batch.top_k[rows], vocab), vocab)
    top_p = batch.top_p[rows]
    uniform = torch.from_numpy(batch.uniform[rows]).to(device)[:, None]
    if (top_k == vocab).all() and (top_p == 1).all():
        return _invert(torch.softmax(logits.double(), dim=-1), uniform)
    # The best max(top_k) tokens are all that any of the rows may choose from.
    best, token_ids = logits.topk(int(top_k.max()), dim=-1)
    probs = torch.softmax(logits.double(), dim=-1).gather(-1, token_ids)
    ranks = torch.arange(best.shape[-1], device=device)
    kept = ranks < torch.from_numpy(top_k).to(device)[:, None]
    probs = probs.masked_fill(~kept, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs
    # A token stays while what ranks above it has not reached top_p; the best one always stays.
    limit = torch.from_numpy(top_p.astype(np.float64)).to(device)[:, None]
    probs = probs.masked_fill((before >= limit) & (ranks > 0), 0.0)
    return token_ids.gather(-1, _invert(probs, uniform)[:, None])[:, 0]


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Find where the cumulative sum of `probs` [n, m], not necessarily normalised, passes `uniform` [n, 1]."""
    cumulative = probs.cumsum(dim=-1)
    # From the right: a token of probability 0 is never chosen.
    chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
    last = (probs > 0).int().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(chosen, last)
