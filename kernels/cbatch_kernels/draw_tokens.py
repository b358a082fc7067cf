"""Draws one token per row of logits, each by its row's own rules and its given uniform number.

    logits   [n, vocab], floating point, rows in one piece; stays as it is
    rules    n of them, host arrays
    result   int64 [n]

A row with temperature 0 gets its likeliest token. In others the logits, less the largest in float32, are divided by
the temperature and become probabilities. Tokens stay that are among the `top_k` likeliest, while those above them have
not reached `top_p` of these, and that have `min_p` of the likeliest one's; equals of a token that stays stay too. The
uniform number is inverted through the cumulative distribution of what stays, in the vocabulary's order.

Called by cbatch/engine/sampling.py, through `dispatch`. Leaves out penalties, biases, masks, and where the number is
from.

The reference works in float64. The kernel in Triton, a launch for all rows (`triton_sampling`), takes weights and sums
of a block in float32, since many GPUs have next to no float64, and adds blocks up in float64. Its tokens are the
reference's unless the number lies within rounding, about 1e-6 of all probability, of where two tokens meet, or a token
that close to where it is cut off. No library stands in for it: FlashInfer's sampling draws its own numbers on the
device, several a token where it rejects, so that a seed and a position would not decide the token alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbatch_kernels.upload import to_device

MAX_DRAWN = 2**19  # logits that the reference draws from at a time: what that takes beside them stays within 30 MB


@dataclass(frozen=True, slots=True)
class DrawRules:
    """How n tokens are drawn; host arrays [n]."""

    temperature: npt.NDArray[np.float32]  # 0 is greedy
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]  # 0 keeps all
    min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]  # in [0, 1)

    def __len__(self) -> int:
        return len(self.temperature)

    def at(self, rows: npt.NDArray[np.int64]) -> DrawRules:
        """Give the rules of some rows."""
        return DrawRules(*(getattr(self, field.name)[rows] for field in fields(self)))

    def spread(self, rows: npt.NDArray[np.int64], count: int) -> DrawRules:
        """Give these rules to `rows` of so many; the others are greedy."""
        spread = DrawRules(*(np.zeros(count, dtype=getattr(self, field.name).dtype) for field in fields(self)))
        for field in fields(self):
            getattr(spread, field.name)[rows] = getattr(self, field.name)
        return spread


def draw_tokens_ref(logits: Tensor, rules: DrawRules) -> Tensor:
    """Draw a token per row."""
    tokens = logits.argmax(dim=-1)
    drawn = np.flatnonzero(rules.temperature > 0)
    most = max(1, MAX_DRAWN // logits.shape[-1])
    for start in range(0, len(drawn), most):
        rows = drawn[start : start + most]
        index = to_device(rows, logits.device)
        tokens[index] = _draw(logits[index].float(), rules.at(rows))
    return tokens


def _draw(logits: Tensor, rules: DrawRules) -> Tensor:
    """Draw from truncated distributions: logits float32 [m, vocab] → int64 [m]."""
    device, vocab = logits.device, logits.shape[-1]
    temperature = to_device(rules.temperature, device)[:, None]
    # Below the best one, so that the lowest temperature leaves that finite.
    probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature, dim=-1)
    top_k = np.where(rules.top_k > 0, np.minimum(rules.top_k, vocab), vocab)
    truncated = np.flatnonzero((top_k < vocab) | (rules.top_p < 1))
    if len(truncated):
        index = to_device(truncated, device)
        least = _least_kept(probs[index], top_k[truncated], rules.top_p[truncated])
        # By value, in the vocabulary's order: how equals are sorted, and for how many rows, does not enter.
        probs[index] = probs[index].masked_fill(probs[index] < least, 0.0)
    if (rules.min_p > 0).any():
        share = to_device(rules.min_p.astype(np.float64), device)[:, None]
        probs = probs.masked_fill_(probs < share * probs.amax(dim=-1, keepdim=True), 0.0)
    cumulative = probs.cumsum(dim=-1)
    target = to_device(rules.uniform, device)[:, None] * cumulative[:, -1:]
    # From the right, so that a token of probability 0 is never chosen.
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = vocab - 1 - (probs > 0).int().flip(-1).argmax(dim=-1)
    return torch.minimum(chosen, last)


def _least_kept(probs: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> Tensor:
    """Find per row of `probs` [n, vocab] the smallest probability that top-k, then top-p of the rest, keep: [n, 1]."""
    best = probs.topk(int(top_k.max()), dim=-1).values
    ranks = torch.arange(best.shape[-1], device=probs.device)
    kept = ranks < to_device(top_k, probs.device)[:, None]
    share = best.masked_fill(~kept, 0.0)
    share = share / share.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    # A token stays while those above it have not reached top_p; the best one always does.
    limit = to_device(top_p.astype(np.float64), probs.device)[:, None]
    kept &= (before < limit) | (ranks == 0)
    return best.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
