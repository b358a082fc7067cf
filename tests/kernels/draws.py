"""Rules of drawing and what follows from them, spelled out in float64, one token at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from cbatch_kernels.draw_tokens import DrawRules
from torch import Tensor

ROUNDING = 2e-6  # of all probability: how near to where two tokens meet either of them will do

Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
ROWS: list[Row] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.5, 10**6, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (2.5, 0, 1.0 - 2**-20, 0.0),
    (1.2, 40, 0.8, 0.0),
    (1.0, 0, 1.0, 0.02),
    (1.7, 30, 0.95, 0.01),
]


def make_rules(rows: list[Row], uniform: npt.NDArray[np.float64]) -> DrawRules:
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    return DrawRules(
        temperature.astype(np.float32),
        top_p.astype(np.float32),
        top_k.astype(np.int64),
        min_p.astype(np.float32),
        uniform,
    )


def shares(logits: Tensor, row: Row) -> npt.NDArray[np.float64]:
    """Give every token's probability."""
    temperature, top_k, top_p, min_p = (float(np.float32(value)) for value in row)
    values = logits.float()
    weights = np.exp((values - values.max()).double().numpy() / temperature)
    ranked = np.argsort(-weights, kind="stable")[: int(top_k) or None]
    least, mass = weights[ranked[0]], 0.0
    for token in ranked:
        if mass >= top_p * weights[ranked].sum() and mass > 0:
            break
        least, mass = weights[token], mass + weights[token]
    weights[(weights < least) | (weights < min_p * weights.max())] = 0
    return weights / weights.sum()


def assert_drawn(tokens: Tensor, logits: Tensor, rows: list[Row], uniform: npt.NDArray[np.float64]) -> None:
    """Hold tokens to the share of probability that their row's number lies in."""
    assert tokens.dtype == torch.int64
    for at, (row, number) in enumerate(zip(rows, uniform.tolist(), strict=True)):
        token = int(tokens[at])
        if row[0] == 0:
            assert token == int(logits[at].argmax())
            continue
        probabilities = shares(logits[at], row)
        assert probabilities[token] > 0, (at, row)
        up_to = probabilities[: token + 1].sum()
        assert up_to - probabilities[token] - ROUNDING <= number <= up_to + ROUNDING, (at, row)
