"""Sampling: the right distributions, and streams that depend on seed and position alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cbatch.config import SamplingParams
from cbatch.engine.request import Prompt, Request
from cbatch.engine.sampling import SamplingBatch, sample, uniform_numbers
from cbatch.engine.stopping import StopCondition

VOCAB = 12
DRAWS = 20_000


def make_request(params: SamplingParams, num_tokens: int = 4) -> Request:
    tokens = list(range(num_tokens))
    return Request(
        prompt=Prompt(0, tokens, params),
        max_tokens=1,
        created_at=0.0,
        stopping=StopCondition(frozenset(), None),
        token_ids=list(tokens),
        tables=[],
    )


def plain_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, then top-p on what is left: spelled out, one token at a time."""
    weights = [math.exp(x / params.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -weights[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.3, top_p=0.8, top_k=6),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 1.5
    expected = np.array(plain_distribution(logits.tolist(), params)) * DRAWS
    batch = SamplingBatch(
        temperature=np.full(DRAWS, params.temperature, dtype=np.float32),
        top_p=np.full(DRAWS, params.top_p, dtype=np.float32),
        top_k=np.full(DRAWS, params.top_k, dtype=np.int64),
        uniform=uniform_numbers(np.arange(DRAWS, dtype=np.uint64), np.full(DRAWS, 9, dtype=np.uint64)),
    )
    counts = np.bincount(sample(logits.expand(DRAWS, -1), batch).numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a token that was cut off was drawn"
    cells = expected > 0
    chi_square = float(((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    # Mean plus five deviations of the chi-square distribution: with fixed seeds this never flickers.
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_uniform_numbers_are_uniform_along_positions_and_seeds() -> None:
    positions = np.arange(DRAWS, dtype=np.uint64)
    for numbers in (
        uniform_numbers(np.full(DRAWS, 42, dtype=np.uint64), positions),
        uniform_numbers(positions, np.full(DRAWS, 42, dtype=np.uint64)),
    ):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        chi_square = float(((counts - DRAWS / 20) ** 2 / (DRAWS / 20)).sum())
        assert chi_square < 19 + 5 * math.sqrt(2 * 19)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_a_row_is_drawn_alike_whatever_its_neighbours() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, VOCAB)
    requests = [
        make_request(SamplingParams(temperature=0.9, seed=1)),
        make_request(SamplingParams(temperature=0.0)),
        make_request(SamplingParams(temperature=1.2, top_k=3, seed=2), num_tokens=7),
        make_request(SamplingParams(temperature=1.0, top_p=0.5, seed=3)),
        make_request(SamplingParams(temperature=2.0, top_p=0.9, top_k=200, seed=2**63 - 1)),
    ]
    together = sample(logits, SamplingBatch.build(requests)).tolist()
    backwards = sample(logits.flip(0), SamplingBatch.build(requests[::-1])).tolist()[::-1]
    alone = [int(sample(logits[i : i + 1], SamplingBatch.build([r]))) for i, r in enumerate(requests)]
    assert together == backwards == alone


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, VOCAB)
    requests = [
        make_request(SamplingParams(temperature=0.0, top_k=5, top_p=0.1)),
        make_request(SamplingParams(temperature=1.9, top_k=1, seed=5)),
        make_request(SamplingParams(temperature=1.9, top_p=1e-6, seed=6)),
    ]
    assert sample(logits, SamplingBatch.build(requests)).tolist() == logits.argmax(-1).tolist()


def test_the_stream_moves_on_with_the_position_and_differs_by_seed() -> None:
    flat = torch.zeros(1, 50_000)
    drawn = {
        int(sample(flat, SamplingBatch.build([make_request(SamplingParams(temperature=1.0, seed=seed), length)])))
        for seed in (0, 1, 2)
        for length in range(1, 30)
    }
    assert len(drawn) > 80


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 4), float("-inf"))
    logits[0, 2] = 0.0
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        batch = SamplingBatch(
            np.ones(1, np.float32), np.ones(1, np.float32), np.zeros(1, np.int64), np.array([uniform])
        )
        assert sample(logits, batch).tolist() == [2]
