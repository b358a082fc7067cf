"""What an observer is told of every step, and the bounded series of a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from cbatch.config import SamplingParams
from cbatch.engine.observer import RequestEvent, StepRecord, StepRecorder, StepTimes
from cbatch.engine.request import Prompt, RequestStatus
from cbatch.engine.series import MAX_POINTS, MEANS, SUMS, StepSeries
from cbatch.engine.step import StepLimits
from cbatch.models.load import LoadedModel
from tests.engine.fakes import Harness, make_cache, make_request
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens
from tests.tiny_models import build_tiny

PENDING, PREFILLING, DECODING, FINISHED = RequestStatus


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny("llama", tmp_path_factory.mktemp("llama")))


class Notes:
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def events_of(self, request_id: int) -> list[RequestEvent]:
        return [event for record in self.records for event in record.events if event.request_id == request_id]


def watched(harness: Harness) -> Notes:
    """Run a harness to its end with somebody watching."""
    notes = Notes()
    recorder = StepRecorder(notes)
    while harness.scheduler.has_work:
        now = float(harness.num_steps)
        before = len(harness.finished)
        plan = harness.step()
        load = harness.cache.load({})
        times = StepTimes(now, now + 0.1, now + 0.5, now + 0.6)
        finished = harness.finished[before:]
        changes = recorder.changes([*harness.scheduler.active, *(f.request for f in finished)], now)
        recorder.record(harness.scheduler, plan, load, finished, times, changes)
    return notes


def test_a_request_is_seen_in_each_of_its_states(loaded: LoadedModel) -> None:
    engine, notes = make_engine(loaded, max_batch_tokens=16), Notes()
    engine.observe(notes)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    list(engine.generate([Prompt(7, make_tokens(40), sampling)]))
    events = notes.events_of(7)
    assert [event.state for event in events] == [PENDING, PREFILLING, DECODING, FINISHED]
    first, third = notes.records[0], notes.records[2]
    assert [event.at for event in events[1:]] == [first.times.began, third.times.ran, notes.records[-1].times.ended]
    assert events[0].at <= events[1].at
    assert (events[-1].num_prompt_tokens, events[-1].num_generated, events[-1].cached_tokens) == (40, 3, 0)
    tokens = [(record.prefill_tokens, record.decode_tokens) for record in notes.records]
    assert tokens == [(16, 0), (16, 0), (8, 0), (0, 1), (0, 1)]


def test_what_a_step_reads_and_attends_to(loaded: LoadedModel) -> None:
    engine, notes = make_engine(loaded, max_batch_tokens=32, page_size=16), Notes()
    engine.observe(notes)
    list(engine.generate([Prompt(0, make_tokens(40), SamplingParams(max_tokens=2, ignore_eos=True))]))
    assert [record.kv_tokens_read for record in notes.records] == [32, 48, 48]
    assert [record.num_pairs for record in notes.records] == [32 * 33 / 2, 8 * 32 + 8 * 9 / 2, 0]
    assert [record.load.owned_blocks for record in notes.records] == [2, 3, 3]
    assert all(r.load.owned_blocks + r.load.cached_blocks + r.load.free_blocks == 128 for r in notes.records)
    assert [record.load.waste for record in notes.records] == [0, 8 / 48, 7 / 48]
    assert all(r.times.began <= r.times.scheduled <= r.times.ran <= r.times.ended for r in notes.records)


def test_what_stays_in_the_cache_for_later_is_no_free_block(loaded: LoadedModel) -> None:
    engine, notes = make_engine(loaded), Notes()
    engine.observe(notes)
    sampling = SamplingParams(max_tokens=1)
    for number in range(2):
        list(engine.generate([Prompt(number, make_tokens(40, seed=number), sampling)]))
    assert [record.load.cached_blocks for record in notes.records] == [0, 2]
    assert [record.load.free_blocks for record in notes.records] == [125, 123]


@pytest.mark.parametrize(("num_host_pages", "counted"), [(0, "num_soft_resets"), (20, "num_offloads")])
def test_a_request_that_moves_out_is_pending_again(num_host_pages: int, counted: str) -> None:
    harness = Harness(make_cache(6, 2), StepLimits(8, 4, 100), num_host_pages=num_host_pages)
    harness.add(*(make_request(number, [number] * 3, 6, created_at=-1.0) for number in range(3)))
    notes = watched(harness)
    moved = sum(getattr(record, counted) for record in notes.records)
    assert moved > 0
    if num_host_pages:
        assert sum(record.num_restores for record in notes.records) == moved
    states = {number: [event.state for event in notes.events_of(number)] for number in range(3)}
    assert sum(PENDING in found[1:] for found in states.values()) > 0
    assert sum(found.count(PENDING) - 1 for found in states.values()) == moved
    for number, found in states.items():
        at = [event.at for event in notes.events_of(number)]
        assert (found[:2], found[-1], at) == ([PENDING, PREFILLING], FINISHED, sorted(at))
        after = {PENDING: {PREFILLING}, PREFILLING: {DECODING, PENDING}, DECODING: {FINISHED, PENDING}}
        assert all(later in after[earlier] for earlier, later in pairwise(found))


def test_requests_that_are_given_up_are_forgotten(loaded: LoadedModel) -> None:
    engine, notes = make_engine(loaded), Notes()
    engine.observe(notes)
    prompt = Prompt(0, make_tokens(20), SamplingParams(max_tokens=9, ignore_eos=True))
    steps = engine.steps(iter([prompt]))
    next(steps)
    steps.close()
    list(engine.generate([prompt]))
    assert [event.state for event in notes.events_of(0)].count(PENDING) == 2


def test_an_engine_that_waits_for_prompts_says_so(loaded: LoadedModel) -> None:
    def slow() -> Iterator[Prompt | None]:
        yield Prompt(0, make_tokens(4), SamplingParams(max_tokens=4, ignore_eos=True))
        for _ in range(3):  # looked at before steps that run with one request
            yield None
        for _ in range(5):
            yield None
        yield Prompt(1, make_tokens(4), SamplingParams(max_tokens=4, ignore_eos=True))

    engine = make_engine(loaded)
    for _ in engine.steps(slow()):
        pass
    assert engine.stats.starved_steps == 4
    assert engine.stats.idle_s > 0
    fed = make_engine(loaded)
    list(fed.generate([Prompt(0, make_tokens(4), SamplingParams(max_tokens=4, ignore_eos=True))]))
    assert (fed.stats.starved_steps, fed.stats.idle_s) == (0, 0.0)


# The series


def test_the_engine_writes_a_series(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_batch_tokens=16)
    list(engine.generate([Prompt(0, make_tokens(20), SamplingParams(max_tokens=3, ignore_eos=True))]))
    series = engine.stats.series.as_dict()
    assert (series["steps_per_point"], series["prefill_tokens"], series["decode_tokens"]) == (
        1,
        [16, 4, 0, 0],
        [0, 0, 1, 1],
    )
    assert series["running"] == [1, 1, 1, 1]
    assert series["at_s"] == sorted(series["at_s"])  # type: ignore[type-var]


@pytest.mark.parametrize("count", [0, 1, MAX_POINTS, MAX_POINTS + 1, 5 * MAX_POINTS + 3])
def test_a_series_is_bounded_and_keeps_its_sums(count: int) -> None:
    series = StepSeries()
    for i in range(count):
        series.add(float(i), [float(i)] * (len(MEANS) + len(SUMS)))
    table = series.as_dict()
    num_points, per_point = len(table["at_s"]), table["steps_per_point"]  # type: ignore[arg-type]
    assert num_points <= MAX_POINTS
    assert num_points == -(-count // per_point)  # type: ignore[operator]
    assert sum(table["preemptions"]) == pytest.approx(sum(range(count)), rel=1e-4)  # type: ignore[arg-type]
    for number in range(num_points):
        steps = range(count)[number * per_point : (number + 1) * per_point]  # type: ignore[operator]
        assert table["at_s"][number] == steps[0]  # type: ignore[index]
        assert table["running"][number] == pytest.approx(sum(steps) / len(steps), rel=1e-4)  # type: ignore[index]
