"""The search on made-up costs: it finds planted optima through noise, and never takes what is really slower."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from cbatch.tune.propose import Proposer
from cbatch.tune.search import MAX_ROUNDS, POINTS_PER_KNOB, Limits, Search
from cbatch.tune.space import Knob, Point
from cbatch.tune.trial import Outcome
from tests.tune.surfaces import BATCH_TOKENS, PAGE_SIZES, Bench, hill, make_space, run, search

DEFAULT = (16, 512)
SPACE = make_space(PAGE_SIZES, BATCH_TOKENS, baseline=DEFAULT)


@pytest.mark.parametrize("seed", range(6))
def test_a_planted_optimum_is_found_through_noise(seed: int) -> None:
    rng = random.Random(seed)
    top = rng.choice(SPACE.points)
    speed = hill(SPACE, top, steepness=0.08)
    verdict = run(SPACE, Bench(speed, noise=0.02, drift=rng.uniform(-2e-4, 2e-4), seed=seed), trials=16)
    assert speed(verdict.point) > 0.93
    assert speed(verdict.point) >= speed(DEFAULT) * (1 - 2 * verdict.noise)


@pytest.mark.parametrize("bad", [(8, 64), (256, 64), (256, 8192)])
def test_a_bad_default_is_recovered(bad: Point) -> None:
    space = make_space(PAGE_SIZES, BATCH_TOKENS, baseline=bad)
    speed = hill(space, (32, 1024), steepness=0.1)
    verdict = run(space, Bench(speed, noise=0.02), trials=14)
    assert speed(verdict.point) > 0.9 > 0.75 > speed(bad)
    assert verdict.gain is not None
    assert verdict.gain.is_real


@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_matters_the_default_stays(seed: int) -> None:
    verdict = run(SPACE, Bench(lambda _: 1.0, noise=0.01, seed=seed), trials=8)
    assert verdict.gain is not None
    assert verdict.point == DEFAULT or verdict.gain.ratio < 0.03  # luck beyond 2.5 deviations of what it is
    assert abs(verdict.gain.ratio) < 0.05


def test_a_default_that_is_best_stays() -> None:
    verdict = run(SPACE, Bench(hill(SPACE, DEFAULT), noise=0.02), trials=8)
    assert verdict.point == DEFAULT
    assert verdict.best != DEFAULT


def test_a_gain_within_the_noise_is_none() -> None:
    def chosen(seed: int) -> Point:
        bench = Bench(lambda point: 1.0 + 0.01 * (point == (32, 512)), noise=0.05, seed=seed)
        return run(SPACE, bench, trials=8).point

    assert sum(chosen(seed) != DEFAULT for seed in range(8)) <= 1


def test_a_machine_that_slows_down_decides_nothing() -> None:
    """The last trials are slower by a fifth; compared within their rounds they are not."""
    speed = hill(SPACE, (64, 512), steepness=0.1)
    for drift in (-4e-4, 4e-4):
        verdict = run(SPACE, Bench(speed, drift=drift), trials=12)
        assert speed(verdict.point) > 0.95


def test_more_is_not_taken_for_better() -> None:
    """Throughput peaks at 32 requests and declines, as it does where caches overflow: vllm-project/vllm#33168."""
    knob = Knob("max_requests_per_batch", (1, 2, 4, 8, 16, 32, 64, 128))
    space = make_space(knob, baseline=(128,))
    speed = {1: 0.1, 2: 0.2, 4: 0.36, 8: 0.6, 16: 0.85, 32: 1.0, 64: 0.9, 128: 0.7}
    verdict = run(space, Bench(lambda point: speed[int(point[0])], noise=0.02), trials=8)
    assert verdict.point == (32,)


def test_settings_without_an_order_are_searched_too() -> None:
    schedulers, sharing = Knob("scheduler_type", ("fifo", "prefill_first")), Knob("allow_block_sharing", (False, True))
    space = make_space(schedulers, sharing, baseline=("fifo", False))
    verdict = run(space, Bench(lambda point: 1.0 + 0.5 * (point == ("prefill_first", True)), noise=0.01), trials=4)
    assert verdict.point == ("prefill_first", True)


def test_the_default_is_in_every_round() -> None:
    bench = Bench(hill(SPACE, (64, 1024)), noise=0.02)
    run(SPACE, bench, trials=8)
    last = [point for point, rung in bench.asked if rung == 2]
    assert bench.asked[0] == (DEFAULT, 0)
    assert 3 <= last.count(DEFAULT) <= MAX_ROUNDS
    assert max(last.count(point) for point in last) == last.count(DEFAULT)


@pytest.mark.parametrize("trials", [1, 2, 5])
def test_trials_count_distinct_configurations(trials: int) -> None:
    searched = search(SPACE, Bench(hill(SPACE, (64, 1024)), noise=0.02), trials=trials)
    verdict = searched.run()
    assert len(searched.book.points) == trials
    assert verdict.point == DEFAULT or trials > 1


def test_no_configuration_is_tried_twice_on_the_small_sample_and_all_where_there_is_room() -> None:
    space = make_space(Knob("page_size", (8, 16, 32)), Knob("max_batch_tokens", (256, 512)), baseline=DEFAULT)
    bench = Bench(hill(space, (8, 256)))
    run(space, bench, trials=100)
    tried = [point for point, rung in bench.asked if rung == 0]
    assert sorted(tried) == sorted([*space.points, DEFAULT])  # and the default once more, for the noise


@pytest.mark.parametrize("budget_s", [40.0, 120.0, 600.0])
def test_the_budget_is_kept_within_a_trial(budget_s: float) -> None:
    bench = Bench(hill(SPACE, (64, 1024)), noise=0.02)
    searched = search(SPACE, bench, budget_s=budget_s)
    verdict = searched.run()
    assert bench.now < budget_s + bench.longest_s
    assert len(searched.book.points) <= POINTS_PER_KNOB * 2
    if budget_s == 600:
        assert bench.now > budget_s / 2 or (verdict.gain is not None and verdict.gain.is_real)


def test_a_budget_of_one_trial_keeps_the_default() -> None:
    bench = Bench(hill(SPACE, (64, 1024)))
    verdict = run(SPACE, bench, budget_s=1.0)
    assert verdict.point == DEFAULT
    assert verdict.gain is None
    assert len(bench.asked) == 1


class Failing(Bench):
    """Some configurations run out of memory, from some rung on."""

    def measure(self, point: Point, rung: int) -> Outcome:
        outcome = super().measure(point, rung)
        first = {**dict.fromkeys(self.failing, 0), **self.late}.get(point)
        if first is not None and rung >= first:
            return replace(outcome, status="failed", reason="memory ran out")
        return outcome

    failing: frozenset[Point] = frozenset()
    late: dict[Point, int] = {}  # noqa: RUF012


def test_a_failed_trial_is_a_result() -> None:
    """The top and all beyond it fail: the best of those that work is taken."""
    speed = hill(SPACE, (256, 8192), steepness=0.05)
    bench = Failing(speed, noise=0.01)
    bench.failing = frozenset(p for p in SPACE.points if int(p[1]) > 1024 or int(p[0]) > 64)
    searched = search(SPACE, bench, trials=16)
    verdict = searched.run()
    assert verdict.point not in bench.failing
    working = [speed(p) for p in SPACE.points if p not in bench.failing]
    assert speed(verdict.point) > 0.93 * max(working)
    failed = [point for point in searched.book.points if searched.book.failure(point) is not None]
    assert failed
    assert all(sum(asked == point for asked, _ in bench.asked) == 1 for point in failed)


def test_one_that_fails_on_the_large_sample_is_out() -> None:
    space = make_space(Knob("page_size", (8, 16, 32)), Knob("max_batch_tokens", (256, 512)), baseline=DEFAULT)
    bench = Failing(hill(space, (32, 256), steepness=0.2))
    bench.late = {(32, 256): 2}
    verdict = run(space, bench, trials=6)
    assert verdict.point != (32, 256)
    assert verdict.gain is not None


def test_a_default_that_fails_is_replaced_by_what_works() -> None:
    bench = Failing(hill(SPACE, (16, 256)))
    bench.failing = frozenset({DEFAULT})
    verdict = run(SPACE, bench, trials=8)
    assert verdict.point != DEFAULT
    assert verdict.gain is None


def test_where_all_fails_the_default_stays() -> None:
    bench = Failing(lambda _: 1.0)
    bench.failing = frozenset(SPACE.points)
    assert run(SPACE, bench, trials=4).point == DEFAULT


def test_known_configurations_are_taken_first_and_count() -> None:
    bench = Bench(hill(SPACE, (64, 1024)))
    known = [DEFAULT, (32, 512), (7, 7), (64, 512)]  # one is of another space
    limits = Limits(4, None, lambda: bench.now)
    Search(SPACE, 3, bench, Proposer(SPACE, seed=0), limits, known=known).run()
    tried = list(dict.fromkeys(point for point, rung in bench.asked if rung == 0))
    assert tried[0] == DEFAULT
    assert set(tried[1:3]) == {(32, 512), (64, 512)}
    assert len(tried) == 4


def test_what_costs_nothing_is_taken_beyond_the_budget() -> None:
    """A search that went on to its budget ends in the same way when it runs again, from the journal alone."""
    bench = Bench(hill(SPACE, (64, 1024)), noise=0.01)
    first = search(SPACE, bench, budget_s=300.0)
    verdict = first.run()
    answers: dict[tuple[Point, int], list[Outcome]] = {}
    for trial in first.book.trials:
        answers.setdefault((trial.point, trial.rung), []).append(trial.outcome)

    class Recorded(Bench):
        def has(self, point: Point, rung: int) -> bool:
            return bool(answers.get((point, rung)))

        def measure(self, point: Point, rung: int) -> Outcome:
            return answers[point, rung].pop(0)

    limits = Limits(None, 300.0, lambda: math.inf)
    recorded = Recorded(lambda _: 1.0)
    again = Search(SPACE, 3, recorded, Proposer(SPACE, seed=0), limits, known=first.book.points)
    assert again.run() == verdict
    assert [(t.point, t.rung) for t in again.book.trials] == [(t.point, t.rung) for t in first.book.trials]


def test_the_same_seed_and_outcomes_give_the_same_proposals() -> None:
    runs = []
    for _ in range(2):
        bench = Bench(hill(SPACE, (64, 1024)), noise=0.02, seed=3)
        run(SPACE, bench, trials=8)
        runs.append(bench.asked)
    assert runs[0] == runs[1]
