"""Sampling: the right distributions, and streams that depend on seed and position alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from cbatch.config import SamplingParams
from cbatch.engine.history import TokenHistory
from cbatch.engine.request import NextToken, Prompt, Request
from cbatch.engine.sampling import SamplingBatch, sample, uniform_numbers
from cbatch.engine.stopping import StopCondition

VOCAB = 12
DRAWS = 20_000
ENDING = 11


def make_request(params: SamplingParams, num_tokens: int = 4, output: Sequence[int] = ()) -> Request:
    prompt = list(range(num_tokens))
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return Request(
        prompt=Prompt(0, prompt, params),
        max_tokens=1,
        created_at=0.0,
        stopping=StopCondition(frozenset({ENDING}), None),
        token_ids=[*prompt, *output],
        tables=[],
        history=TokenHistory(prompt, counts_prompt=params.repetition_penalty != 1) if penalised else None,
    )


def batch_of(requests: Sequence[Request]) -> SamplingBatch:
    return SamplingBatch.build([NextToken(request) for request in requests])


def plain_distribution(
    logits: list[float], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """Everything in the order that is documented, spelled out, one token at a time."""
    logits = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        count = list(output).count(token)
        logits[token] -= params.frequency_penalty * count + (params.presence_penalty if count else 0)
        logits[token] += dict(params.logit_bias).get(token, 0)
        if token == ENDING and len(output) < params.min_tokens:
            logits[token] = -math.inf
    if params.temperature == 0:
        return [float(token == logits.index(max(logits))) for token in range(len(logits))]
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
    kept = [i for i in kept if weights[i] >= params.min_p * max(weights)]
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
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(temperature=2.0, min_p=0.1, top_p=0.9, top_k=8),
        SamplingParams(temperature=1.0, repetition_penalty=1.8),
        SamplingParams(temperature=1.0, repetition_penalty=0.5, presence_penalty=-1.0),
        SamplingParams(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.4),
        SamplingParams(temperature=1.0, logit_bias=((2, 3.0), (9, -100.0))),
        SamplingParams(temperature=1.0, min_tokens=6, logit_bias=((ENDING, 50.0),)),
        SamplingParams(temperature=1.0, min_tokens=5, logit_bias=((ENDING, 2.0),)),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 1.5
    output = [5, 6, 5, 7, 5]
    expected = np.array(plain_distribution(logits.tolist(), params, range(4), output)) * DRAWS
    requests = [make_request(replace(params, seed=seed), output=output) for seed in range(DRAWS)]
    tokens = sample(logits.expand(DRAWS, -1), batch_of(requests))
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
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
    together = sample(logits, batch_of(requests)).tolist()
    backwards = sample(logits.flip(0), batch_of(requests[::-1])).tolist()[::-1]
    alone = [int(sample(logits[i : i + 1], batch_of([r]))) for i, r in enumerate(requests)]
    assert together == backwards == alone


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, VOCAB)
    requests = [
        make_request(SamplingParams(temperature=0.0, top_k=5, top_p=0.1)),
        make_request(SamplingParams(temperature=1.9, top_k=1, seed=5)),
        make_request(SamplingParams(temperature=1.9, top_p=1e-6, seed=6)),
    ]
    assert sample(logits, batch_of(requests)).tolist() == logits.argmax(-1).tolist()
    # Of equals it is the first, with top_k 1 as with temperature 0, and beside what is edited, too.
    equals = torch.zeros(20, VOCAB)
    one = [make_request(SamplingParams(temperature=1.0, top_k=1, seed=seed)) for seed in range(10)]
    one += [make_request(SamplingParams(temperature=1.0, top_k=1, seed=seed, min_tokens=9)) for seed in range(10)]
    assert sample(equals, batch_of(one)).tolist() == [0] * 20


def test_the_stream_moves_on_with_the_position_and_differs_by_seed() -> None:
    flat = torch.zeros(1, 50_000)
    drawn = {
        int(sample(flat, batch_of([make_request(SamplingParams(temperature=1.0, seed=seed), length)])))
        for seed in (0, 1, 2)
        for length in range(1, 30)
    }
    assert len(drawn) > 80


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 4), float("-inf"))
    logits[0, 2] = 0.0
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        batch = batch_of([make_request(SamplingParams(temperature=1.0))])
        batch = replace(batch, rules=replace(batch.rules, uniform=np.array([uniform])))
        assert sample(logits, batch).tolist() == [2]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 29.0, -5.0]])
    batch = batch_of([make_request(SamplingParams(temperature=temperature, seed=3))])
    assert sample(logits, batch).tolist() == [1]


# Penalties, biases, tokens that are not allowed yet


def random_params(rng: random.Random) -> SamplingParams:
    """Each parameter at its neutral value about half of the time."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 3]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 2.0, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 1.0, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 1.05, -0.5]),
        logit_bias=rng.choice([(), (), ((1, 2.5), (4, -100.0))]),
        min_tokens=rng.choice([0, 3, 50]),
        seed=rng.randrange(2**63),
    )


def test_greedy_rows_follow_the_plain_rules_and_never_their_neighbours() -> None:
    rng = random.Random(11)
    for _ in range(60):
        size = rng.randrange(1, 9)
        logits = torch.tensor([[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(size)])
        params = [random_params(rng) for _ in range(size)]
        outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(6))] for _ in range(size)]

        def build(rows: Sequence[int], params: list[SamplingParams], outputs: list[list[int]]) -> SamplingBatch:
            return batch_of([make_request(params[row], output=outputs[row]) for row in rows])

        order = rng.sample(range(size), size)
        together = sample(logits[order], build(order, params, outputs)).tolist()
        for place, row in enumerate(order):
            alone = int(sample(logits[row : row + 1], build([row], params, outputs)))
            assert together[place] == alone
            likely = plain_distribution(logits[row].tolist(), params[row], range(4), outputs[row])
            assert likely[alone] > 0
            if params[row].temperature == 0:
                assert likely[alone] == 1


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    torch.manual_seed(4)
    logits = torch.randn(1, 50) * 3
    request = make_request(SamplingParams(repetition_penalty=1.7, temperature=0.0), output=[30, 31, 30])
    batch = batch_of([request])
    assert batch.edits is not None
    ours = logits.clone()
    batch.edits.apply(ours)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([request.token_ids]), logits.clone())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("penalty", [1e-30, 1e-38, 1e-46])
def test_the_least_repetition_penalty_repeats_what_was_likely(penalty: float) -> None:
    logits = torch.full((20, VOCAB), -1.0)
    logits[:, :6] = torch.tensor([9.0, 1.0, 0.0, 5.0, 20.0, 3.0])  # the first four are the prompt's
    kinds = [SamplingParams(temperature=float(seed > 9), repetition_penalty=penalty, seed=seed) for seed in range(20)]
    tokens = sample(logits, batch_of([make_request(params) for params in kinds])).tolist()
    assert tokens[:10] == [0] * 10
    assert set(tokens[10:]) <= {0, 1, 3}


def test_histories_are_the_same_token_by_token_and_all_at_once() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(9) for _ in range(40)]
    growing, late = (TokenHistory(tokens[:10], counts_prompt=True) for _ in range(2))
    for end in range(10, 41):
        growing.catch_up(tokens[:end])
    late.catch_up(tokens)
    for history in (growing, late):
        counted = dict(zip(history.token_ids, history.num_generated, strict=True))
        assert counted == {token: tokens[10:].count(token) for token in set(tokens)}


def test_logits_stay_as_they_are_and_plain_greedy_rows_cost_nothing() -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    biased = SamplingParams(temperature=1.0, repetition_penalty=1.2, logit_bias=((3, 5.0),), min_tokens=9)
    sample(logits, batch_of([make_request(biased), make_request(SamplingParams()), make_request(biased)]))
    assert torch.equal(logits, before)
    ended = make_request(SamplingParams(min_tokens=2, stop=("x",)), output=[1, 2])
    plain = batch_of([make_request(SamplingParams()), ended])
    assert len(plain.rows) == 0
    assert plain.edits is None


def test_a_token_behind_drafts_is_chosen_as_if_they_had_been_said() -> None:
    rng = random.Random(4)
    for _ in range(60):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.7]),
            frequency_penalty=rng.choice([0.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.5]),
            min_tokens=rng.randrange(6),
            logit_bias=((3, 2.0), (ENDING, 3.0)),
            seed=rng.randrange(100),
        )
        said = [rng.randrange(VOCAB) for _ in range(6)]
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(999)))
        request = make_request(params, output=said[:3])
        drafted = SamplingBatch.build([NextToken(request, tuple(said[3:end])) for end in (3, 4, 5, 6)])
        spoken = batch_of([make_request(params, output=said[:end]) for end in (3, 4, 5, 6)])
        assert sample(logits, drafted).tolist() == sample(logits, spoken).tolist()
