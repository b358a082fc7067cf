"""The fit finds a planted cost, and what is predicted with it is how long another run takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.engine.modes import MODES
from cbatch.errors import InputError
from cbatch.simulate.calibration import fit_calibration
from cbatch.simulate.cost import CostModel
from cbatch.simulate.fit import fit_cost, solve_non_negative
from cbatch.simulate.lengths import traced_lengths
from cbatch.simulate.simulator import Simulator
from cbatch.simulate.tracefile import TracedSession
from tests.simulate.traces import Clock, draw, stop_the_clock, traced_run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_the_clock(monkeypatch)


@pytest.mark.parametrize("seed", range(3))
def test_each_constant_of_a_planted_cost_is_found(tmp_path: Path, clock: Clock, seed: int) -> None:
    """Each is a good part of a step, and long and short contexts tell what is read from who reads it."""
    planted = CostModel(
        per_step_s=4e-3, per_query_token_s=3e-5, per_kv_token_s=1e-6, per_request_s=3e-4, per_pair_s=1e-7
    )
    works = draw(seed, 150, prompts=(5, 900), outputs=(2, 60))
    limits = {"max_batch_tokens": 256, "max_requests_per_batch": 24, "num_blocks": 2000}
    fit = fit_cost(traced_run(tmp_path / "t.gz", clock, works, planted, noise=0.02, **limits))
    assert asdict(fit.cost) == pytest.approx(asdict(planted), rel=0.1)
    assert fit.typical_error < 0.02


def test_steps_that_vary_by_a_tenth_are_told_as_well_as_that(tmp_path: Path, clock: Clock) -> None:
    sessions = traced_run(tmp_path / "t.gz", clock, draw(0, 150, prompts=(5, 300), outputs=(2, 60)))
    assert fit_cost(sessions).typical_error < 0.1


def test_hidden_tokens_are_found() -> None:
    rng = np.random.default_rng(0)
    hidden = CostModel(per_step_s=0.02, per_query_token_s=1e-4, per_kv_token_s=0, per_request_s=0, hidden_tokens=256)
    session = TracedSession({}, [(None, 1)])
    at = 0.0
    for count in rng.integers(1, 1000, 400).tolist():
        duration = hidden.step_s(count, 0, 1, 0) * rng.uniform(0.97, 1.03)
        step = {"at_s": at, "run_s": duration, "schedule_s": 0, "update_s": 0, "prefill_tokens": count, "running": 1}
        session.add(
            dict.fromkeys(("decode_tokens", "kv_tokens_read", "requests", "pairs", "waiting"), 0)
            | step
            | {"events": []}
        )
        at += duration
    cost = fit_cost([session]).cost
    assert cost.hidden_tokens == 256
    assert cost.per_query_token_s == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 256, "max_requests_per_batch": 24},
        {"num_blocks": 30},
        {"num_blocks": 30, "num_host_pages": 64},
        {"scheduler_type": "prefill_first"},
    ],
)
def test_another_runs_duration_is_predicted_within_fifteen_percent(
    tmp_path: Path, clock: Clock, settings: dict[str, Any]
) -> None:
    """The cost is fitted to one run; the other has other lengths, shares a prefix and runs with other settings."""
    calibration = fit_calibration(
        traced_run(tmp_path / "a.gz", clock, draw(1, 150, prompts=(5, 200), outputs=(2, 50))), "a"
    )
    other = traced_run(
        tmp_path / "b.gz", clock, draw(2, 200, prompts=(20, 90), outputs=(20, 90), shared=48), **settings
    )
    predicted = Simulator(other[0].engine(), calibration.cost).run(traced_lengths(other))
    measured = other[0].duration_s
    assert predicted.duration_s == pytest.approx(measured, rel=0.15)
    assert predicted.cached_tokens == sum(request.cached_tokens for request in other[0].finished) > 0
    assert predicted.steps == other[0].num_steps
    assert (predicted.preemptions > 0) == ("num_blocks" in settings), "the case does what it is there for"


def test_the_least_squares_are_those_without_negative_ones() -> None:
    """Every entry is optimal: where it is positive the gradient is 0, where it is 0 the error would only grow."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = rng.uniform(0, 1, (60, 4)) * [1, 1e3, 1e6, 1e-3]
        values = table @ [2, 1e-3, 0, 5] - rng.uniform(0, 1, 60)
        found, error = solve_non_negative(table, values)
        assert (found >= 0).all()
        assert error == pytest.approx(((table @ found - values) ** 2).sum())
        gradient = table.T @ (table @ found - values)
        scale = np.abs(table).sum(axis=0)
        assert (np.abs(gradient[found > 0]) < 1e-6 * scale[found > 0]).all()
        assert (gradient[found == 0] > -1e-6 * scale[found == 0]).all()


def test_columns_that_say_the_same_are_no_trouble() -> None:
    table = np.ones((20, 3))
    found, error = solve_non_negative(table, np.full(20, 6.0))
    assert found.sum() == pytest.approx(6)
    assert error == pytest.approx(0, abs=1e-9)


def test_too_few_steps_are_said(tmp_path: Path, clock: Clock) -> None:
    sessions = traced_run(tmp_path / "t.gz", clock, [(5, 0, 3)])
    with pytest.raises(InputError, match="3 steps are too few"):
        fit_cost(sessions)


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_says_how_its_run_batched(tmp_path: Path, clock: Clock, mode: str) -> None:
    (session,) = traced_run(tmp_path / "t.gz", clock, draw(0, 10, prompts=(5, 30), outputs=(2, 6)), mode=mode)
    assert session.mode == mode
