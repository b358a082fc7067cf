"""Drawing against the rules spelled out in float64, one token at a time: what stays, and whose share a number is in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cbatch_kernels import dispatch
from torch import Tensor

from tests.kernels.draws import ROWS, Row, assert_drawn, make_rules, shares

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["reference", "interpreted"], autouse=True)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return str(request.param)


def check(logits: Tensor, rows: list[Row], uniform: npt.NDArray[np.float64]) -> Tensor:
    before = logits.clone()
    tokens = dispatch.draw_tokens(logits, make_rules(rows, uniform))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert_drawn(tokens, logits, rows, uniform)
    return tokens


@pytest.mark.parametrize(
    ("dtype", "vocab", "block"),
    [
        *((dtype, vocab, 512) for dtype in DTYPES for vocab in (7, 500)),
        (torch.float32, 1, 16),
        (torch.float32, 300, 64),
    ],
    ids=str,
)
def test_every_rule_by_itself_and_with_others(
    dtype: torch.dtype, vocab: int, block: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "interpreted":
        from cbatch_kernels import triton_sampling

        monkeypatch.setattr(triton_sampling, "row_choice", lambda *_: (block, 4))
    generator = torch.Generator().manual_seed(vocab)
    rng = np.random.default_rng(vocab)
    # As a model gives them: more columns than there are tokens to choose from.
    wide = torch.full((len(ROWS), vocab + 3), float("nan"), dtype=dtype)
    wide[:, :vocab] = (torch.randn(len(ROWS), vocab, generator=generator) * 3).to(dtype)
    check(wide[:, :vocab], ROWS, rng.random(len(ROWS)))


def test_equals_of_a_token_that_stays_stay_too() -> None:
    levels = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0, float("-inf")]])
    rows: list[Row] = [(1.0, 3, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 4, 0.85, 0.0)]
    numbers = np.linspace(0.001, 0.999, 10)
    for row in rows:
        drawn = check(levels.expand(len(numbers), -1), [row] * len(numbers), numbers)
        assert set(drawn.tolist()) == set(np.flatnonzero(shares(levels[0], row)).tolist())


def test_the_ends_of_the_numbers_belong_to_the_first_and_the_last_token_that_stay() -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, [3, 11, 30]] = torch.tensor([0.0, 1.0, -1.0])
    rows: list[Row] = [(1.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (1.0, 0, 1.0, 0.3)]
    for number, expected in ((0.0, [3, 3, 3]), (1.0 - 2.0**-53, [30, 11, 11])):
        assert check(logits.expand(3, -1), rows, np.full(3, number)).tolist() == expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 29.0, -5.0]])
    assert check(logits, [(temperature, 0, 1.0, 0.0)], np.array([0.7])).tolist() == [1]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_that_is_not_finite_gets_some_token_and_spoils_no_other() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows: list[Row] = [(1.0, 5, 0.9, 0.0)] * 4
    numbers = np.array([0.1, 0.4, 0.6, 0.9])
    expected = check(logits, rows, numbers)
    logits[1, 7] = float("nan")
    logits[2] = float("-inf")
    tokens = dispatch.draw_tokens(logits, make_rules(rows, numbers))
    assert tokens[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert ((tokens >= 0) & (tokens < 50)).all()
