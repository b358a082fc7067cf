"""Gains are told from noise; drift of the machine, which slows both sides down, is none."""

from __future__ import annotations

import math
import random

import pytest

from cbatch.tune.noise import PRIOR_NOISE, compare, estimate_noise


def test_before_anything_was_repeated_the_noise_is_believed() -> None:
    assert estimate_noise([], []) == PRIOR_NOISE
    assert estimate_noise([([100.0], [90.0])], [[100.0]]) == PRIOR_NOISE


@pytest.mark.parametrize("noise", [0.005, 0.05])
@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_the_noise_of_one_measurement_is_found(noise: float, drift: float) -> None:
    rng = random.Random(1)
    rounds = [drift * i for i in range(200)]
    left = [math.exp(rng.gauss(0, noise) + d) for d in rounds]
    right = [1.3 * math.exp(rng.gauss(0, noise) + d) for d in rounds]
    assert estimate_noise([(left, right)], []) == pytest.approx(noise, rel=0.15)
    if drift == 0:
        assert estimate_noise([], [left]) == pytest.approx(noise, rel=0.15)


def test_a_gain_is_a_ratio_and_real_beyond_its_margin() -> None:
    gain = compare([110.0, 55.0, 11.0], [100.0, 50.0, 10.0], 0.02)
    assert gain.ratio == pytest.approx(0.1)
    assert gain.is_real
    assert not gain.is_loss
    loss = compare([100.0, 50.0, 10.0], [110.0, 55.0, 11.0], 0.02)
    assert loss.is_loss
    assert not loss.is_real
    within = compare([110.0], [100.0], 0.05)
    assert not within.is_real
    assert not within.is_loss


def test_more_rounds_tell_smaller_gains() -> None:
    margins = [compare([1.0] * n, [1.0] * n, 0.03).margin for n in (1, 2, 4)]
    assert margins == sorted(margins, reverse=True)


def test_one_bad_round_is_not_the_gain() -> None:
    assert compare([100.0, 100.0, 30.0], [100.0, 100.0, 100.0], 0.02).ratio == pytest.approx(0.0)


def test_rounds_that_one_side_missed_do_not_count() -> None:
    assert compare([100.0], [100.0, 50.0, 50.0], 0.02).ratio == pytest.approx(0.0)
