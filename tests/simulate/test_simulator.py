"""The simulator does what the engine does, step by step; and its clock, its arrivals and its figures are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cbatch.config import SamplingParams
from cbatch.engine.modes import MODES
from cbatch.engine.observer import StepRecord
from cbatch.engine.request import Prompt, RequestStatus
from cbatch.simulate import repeats
from cbatch.simulate.cost import CostModel
from cbatch.simulate.figures import Tally
from cbatch.simulate.repeats import Repeater
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.simulator import SHARED, Simulator
from cbatch.simulate.workload import GivenWorkload, Work
from tests.engine.unloaded import make_unloaded

COST = CostModel(per_step_s=0.01, per_query_token_s=1e-4, per_kv_token_s=1e-6, per_request_s=1e-5, per_pair_s=1e-8)
SETTINGS = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_model_len", "scheduler_type")

ENGINES: dict[str, dict[str, Any]] = {
    "ample": {},
    "tight": {"num_blocks": 14, "page_size": 8},
    "offloading": {"num_blocks": 14, "page_size": 8, "num_host_pages": 20},
    "prefill_first": {"scheduler_type": "prefill_first", "max_batch_tokens": 24, "num_blocks": 40, "page_size": 8},
    "offline": {"scheduler_type": "offline", "num_blocks": 40, "page_size": 8},
    "sliding": {"layer_windows": (None, 16, 16), "num_blocks": 20, "page_size": 8},
    "not sharing": {"allow_block_sharing": False, "num_blocks": 30},
}


class Notes:
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def without_times(self) -> list[Any]:
        """All that does not depend on the clock; requests by their numbers."""
        return [
            (
                *(getattr(r, name) for name in StepRecord.__slots__ if name not in ("times", "events")),
                [replace(event, at=0.0) for event in r.events],
            )
            for r in self.records
        ]


def draw(seed: int, count: int) -> list[Work]:
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        prompt = rng.choice([1, rng.randrange(2, 12), rng.randrange(12, 60)])
        shared = rng.choice([0, min(prompt, 20)])
        works.append(Work(prompt, rng.choice([1, rng.randrange(2, 30)]), shared_tokens=shared))
    return works


def by_engine(mode: str, settings: dict[str, Any], works: list[Work]) -> Notes:
    """Run the real engine, whose model gives the same token always."""
    engine, notes = make_unloaded(mode=mode, **settings), Notes()
    engine.observe(notes)

    def prompts() -> Iterator[Prompt]:
        for number, work in enumerate(works):
            own = work.prompt_tokens - work.shared_tokens
            sampling = SamplingParams(max_tokens=work.output_tokens, ignore_eos=True)
            yield Prompt(number, [SHARED] * work.shared_tokens + [-1 - number] * own, sampling)

    list(engine.generate(prompts()))
    return notes


def by_simulator(mode: str, settings: dict[str, Any], works: list[Work]) -> Notes:
    plan = make_unloaded(mode=mode, **settings).plan
    names = (*SETTINGS, "safety_margin", "allow_block_sharing", "num_host_pages", "layer_windows")
    engine, notes = SimulatedEngine(**{name: getattr(plan, name) for name in names}), Notes()
    Simulator(engine, COST, mode=mode, observer=notes).run(GivenWorkload(works))
    return notes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENGINES)
def test_the_simulator_equals_the_engine_step_by_step(name: str, mode: str) -> None:
    works = draw(seed=len(name), count=40)
    engine, simulator = by_engine(mode, ENGINES[name], works), by_simulator(mode, ENGINES[name], works)
    assert simulator.without_times() == engine.without_times()
    events = [event for record in simulator.records for event in record.events]
    assert sum(event.state is RequestStatus.FINISHED for event in events) == len(works)
    if mode == "continuous+chunked":
        moved = sum(record.num_soft_resets + record.num_offloads for record in simulator.records)
        cached = sum(event.cached_tokens for event in events if event.state is RequestStatus.FINISHED)
        assert (moved > 0) == (name in ("tight", "offloading", "sliding")), "the case does what it is there for"
        assert (cached > 0) == (name not in ("sliding", "not sharing"))


def engine_of(**settings: Any) -> SimulatedEngine:
    values = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 4}
    return SimulatedEngine(**{"max_model_len": 512} | values | settings)


def test_a_step_takes_what_the_cost_model_says() -> None:
    notes = Notes()
    figures = Simulator(engine_of(), COST, observer=notes).run(GivenWorkload([Work(40, 2)]))
    expected = [
        0.01 + 32e-4 + 32e-6 + 1e-5 + 32 * 33 / 2 * 1e-8,
        0.01 + 8e-4 + 48e-6 + 1e-5 + (8 * 32 + 8 * 9 / 2) * 1e-8,
        0.01 + 1e-4 + 48e-6 + 1e-5,
    ]
    assert [r.times.ended - r.times.began for r in notes.records] == pytest.approx(expected)
    assert figures.duration_s == pytest.approx(sum(expected))
    assert figures.ttft_mean_s == pytest.approx(sum(expected[:2]))
    assert figures.itl_p99_s == pytest.approx(expected[2], rel=0.005)
    assert (figures.steps, figures.output_tokens, figures.prompt_tokens) == (3, 2, 40)


def test_hidden_tokens_cost_nothing() -> None:
    cost = replace(COST, hidden_tokens=20)
    assert cost.step_s(20, 0, 0, 0) == 0.01
    assert cost.step_s(21, 0, 0, 0) == pytest.approx(0.01 + 1e-4)


def test_a_request_waits_until_it_arrives() -> None:
    works = [Work(4, 3), Work(4, 1, arrival_s=0.005), Work(4, 1, arrival_s=100.0)]
    notes = Notes()
    figures = Simulator(engine_of(), COST, observer=notes).run(GivenWorkload(works))
    began = {e.request_id: e.at for r in notes.records for e in r.events if e.state is RequestStatus.PREFILLING}
    assert began[0] == 0.0
    assert began[1] == notes.records[0].times.ended, "in the first step after it came"
    assert began[2] == 100.0
    assert figures.duration_s > 100
    assert figures.busy_s < 0.1
    assert figures.ttft_p99_s < 0.03, "counted from its arrival"


def test_what_can_never_fit_is_left_out() -> None:
    figures = Simulator(engine_of(num_blocks=4), COST).run(GivenWorkload([Work(60, 10), Work(60, 5), Work(600, 1)]))
    assert (figures.requests, figures.refused) == (1, 2)
    nothing = Simulator(engine_of(num_blocks=4), COST).run(GivenWorkload([Work(60, 10)]))
    assert (nothing.requests, nothing.refused, nothing.output_tokens_per_s) == (0, 1, 0.0)


def test_the_figures_are_those_of_the_token_times(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    count_finished = Tally.count_finished

    def keep(tally: Tally, finished: Any) -> None:
        done.extend(finished)
        count_finished(tally, finished)

    monkeypatch.setattr(Tally, "count_finished", keep)
    works = draw(seed=3, count=60)
    figures = Simulator(engine_of(num_blocks=16), COST).run(GivenWorkload(works), goodput_itl=0.0125)
    times = [np.array(f.request.token_times) for f in done]
    gaps = np.concatenate([np.diff(t) for t in times])
    first = np.array([f.request.token_times[0] - f.request.created_at for f in done])
    assert figures.output_tokens == sum(len(t) for t in times) == sum(work.output_tokens for work in works)
    assert figures.itl_p99_s == pytest.approx(np.percentile(gaps, 99), rel=0.01)
    assert figures.itl_mean_s == pytest.approx(gaps.mean())
    assert figures.ttft_mean_s == pytest.approx(first.mean())
    assert figures.ttft_p99_s == pytest.approx(np.percentile(first, 99))
    assert figures.output_tokens_per_s == pytest.approx(figures.output_tokens / figures.duration_s)
    good = sum(len(t) for t in times if len(t) < 2 or np.diff(t).mean() <= 0.0125)
    assert 0 < good < figures.output_tokens
    assert figures.goodput_tokens_per_s == pytest.approx(good / figures.duration_s)


def test_the_same_is_simulated_twice() -> None:
    works = GivenWorkload(draw(seed=5, count=30))
    assert Simulator(engine_of(), COST).run(works) == Simulator(engine_of(), COST).run(works)


RESERVING = {"has_pages": False, "page_size": 128, "num_blocks": 6, "max_model_len": 128, "allow_block_sharing": False}
QUICK = {**{name: settings for name, settings in ENGINES.items() if name != "sliding"}, "reserving": RESERVING}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUICK)
def test_steps_that_are_taken_at_once_come_to_the_same(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [work._replace(arrival_s=0.03 * i) for i, work in enumerate(draw(seed=11, count=40))]
    settings: dict[str, Any] = QUICK[name]
    at_once: list[int] = []
    move_on = Repeater._move_on

    def count(repeater: Repeater, active: Any, times: list[float], sampled: int) -> None:
        at_once.append(len(times))
        move_on(repeater, active, times, sampled)

    monkeypatch.setattr(Repeater, "_move_on", count)
    for given in (works, [work._replace(arrival_s=0.0) for work in works]):
        quick = Simulator(engine_of(**settings), COST, mode=mode).run(GivenWorkload(given), goodput_ttft=0.5)
        monkeypatch.setattr(repeats, "LEAST", 10**9)
        slow = Simulator(engine_of(**settings), COST, mode=mode).run(GivenWorkload(given), goodput_ttft=0.5)
        monkeypatch.undo()
        monkeypatch.setattr(Repeater, "_move_on", count)
        assert quick == slow
    assert sum(at_once) > 10
