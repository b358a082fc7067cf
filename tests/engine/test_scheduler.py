"""Which requests run at a step, with how many tokens, and what becomes of them: the cases worth naming."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import SupportsIndex

import pytest

from cbatch.engine.cache.allocator import make_table
from cbatch.engine.output import failed_output, finished_output
from cbatch.engine.policies import FifoScheduler
from cbatch.engine.request import Request, RequestOutput, RequestStatus
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.step import FinishedRequest, StepLimits, StepPlan
from cbatch.errors import RowError
from tests.engine.fakes import EOS, FakeRunner, Harness, completion, make_cache, make_request, toy_model

AMPLE = 1_000


def update(scheduler: Scheduler, runner: FakeRunner, plan: StepPlan) -> list[FinishedRequest]:
    running = runner.launch(plan)
    scheduler.launch(plan)
    return scheduler.update(plan, running.collect(), 0.0)


def make_harness(
    num_chunks: int = AMPLE,
    page_size: int = 4,
    *,
    max_batch_tokens: int = 64,
    max_requests: int = 8,
    sharing: bool = True,
    failing: dict[int, int] | None = None,
) -> Harness:
    limits = StepLimits(max_batch_tokens, max_requests, max_pages_read=num_chunks)
    return Harness(make_cache(num_chunks, page_size, sharing=sharing), limits, failing or {})


def counts(plan: StepPlan) -> dict[int, int]:
    """request id → tokens, in the plan's order."""
    return {item.request.request_id: item.num_tokens for item in plan.items}


def distinct(request_id: int, num_tokens: int) -> list[int]:
    """A prompt that shares no prefix with another one."""
    return [request_id + 10] * num_tokens


# The life of a request (E1, E2, E3)


def test_a_request_is_pending_then_prefills_in_chunks_then_decodes_a_token_a_step() -> None:
    harness = make_harness(max_batch_tokens=4)
    request = make_request(0, range(10), 3)
    harness.add(request)
    seen = []
    while harness.scheduler.has_work:
        seen.append((request.status, counts(harness.step()), request.num_generated))
    assert seen == [
        (RequestStatus.PENDING, {0: 4}, 0),
        (RequestStatus.PREFILLING, {0: 4}, 0),
        (RequestStatus.PREFILLING, {0: 2}, 1),
        (RequestStatus.DECODING, {0: 1}, 2),
        (RequestStatus.DECODING, {0: 1}, 3),
    ]
    assert request.status is RequestStatus.FINISHED


def test_decodes_come_first_then_prefills_then_waiting_requests_in_arrival_order() -> None:
    harness = make_harness(max_batch_tokens=10)
    harness.add(make_request(0, distinct(0, 2), 50), make_request(1, distinct(1, 20), 50))
    assert counts(harness.step()) == {0: 2, 1: 8}
    harness.add(*(make_request(i, distinct(i, 3), 50) for i in (2, 3, 4)))
    assert list(counts(harness.step()).items()) == [(0, 1), (1, 9)]
    assert list(counts(harness.step()).items()) == [(0, 1), (1, 3), (2, 3), (3, 3)]
    assert list(counts(harness.step()).items()) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 3)]


def test_a_place_that_becomes_free_is_taken_at_the_next_step() -> None:
    harness = make_harness(max_requests=2)
    harness.add(*(make_request(i, distinct(i, 3), [5, 1, 1, 1][i]) for i in range(4)))
    running = []
    while harness.scheduler.has_work:
        running.append(sorted(counts(harness.step())))
    assert running == [[0, 1], [0, 2], [0, 3], [0], [0]]


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("max_requests", [1, 3, 8])
def test_the_token_budget_is_used_up_while_there_is_work(max_batch_tokens: int, max_requests: int) -> None:
    harness = make_harness(max_batch_tokens=max_batch_tokens, max_requests=max_requests, sharing=False)
    requests = [make_request(i, distinct(i, 1 + i * 7 % 19), 1 + i * 5 % 11) for i in range(20)]
    harness.add(*requests)
    while harness.scheduler.has_work:
        can_run = [*harness.scheduler.active, *harness.scheduler.waiting][:max_requests]
        could = sum(request.num_uncomputed for request in can_run)
        plan = harness.step()
        assert plan.num_tokens == min(could, max_batch_tokens)
    # First come, first served.
    started = [request.scheduled_at for request in requests]
    assert started == sorted(started, key=lambda at: at or 0.0)


# Prefix sharing (E11, E12)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_tokens", [4, 8, 9])
def test_a_prompt_wholly_in_the_cache_still_computes_a_token(page_size: int, num_tokens: int) -> None:
    harness = make_harness(page_size=page_size)
    first, again = (make_request(i, range(num_tokens), 3) for i in range(2))
    for request in (first, again):
        harness.add(request)
        harness.run()
    assert again.token_ids == first.token_ids
    cached = (num_tokens - 1) // page_size * page_size
    assert (again.cached_tokens, again.computed_tokens) == (cached, num_tokens - cached + 2)


def test_a_half_filled_block_is_not_shared() -> None:
    harness = make_harness()
    harness.add(make_request(0, range(7), 1))
    harness.run()
    later = make_request(1, range(7), 1)
    longer = make_request(2, [0, 1, 2, 3, 4, 5, 6, 99, 100], 1)
    harness.add(later, longer)
    harness.run()
    assert (later.cached_tokens, longer.cached_tokens) == (4, 4)


def test_generated_tokens_are_shared_as_the_prompts_are() -> None:
    harness = make_harness()
    turn = make_request(0, range(6), 11)
    harness.add(turn)
    harness.run()
    next_turn = make_request(1, [*turn.token_ids, 5, 5], 2)
    harness.add(next_turn)
    harness.run()
    assert next_turn.cached_tokens == 16  # of 17, the last of which was never computed


def test_64_requests_with_one_prefix_that_come_at_once_compute_it_once() -> None:
    harness = make_harness(2 * AMPLE, max_batch_tokens=512, max_requests=64)
    prefix = list(range(100))
    requests = [make_request(i, [*prefix, 200 + i], 2) for i in range(64)]
    harness.add(*requests)
    assert counts(harness.step()) == {0: 101}
    assert counts(harness.step()) == {0: 1} | dict.fromkeys(range(1, 64), 1)
    harness.run()
    assert sum(request.cached_tokens for request in requests) == 63 * 100
    assert harness.runner.num_computed == 100 + 64 * 2


def test_requests_that_share_nothing_pass_those_that_wait_for_a_prefix() -> None:
    harness = make_harness(max_batch_tokens=20)
    harness.add(make_request(0, range(30), 9), make_request(1, range(30), 9), make_request(2, distinct(2, 5), 9))
    assert counts(harness.step()) == {0: 20}
    assert counts(harness.step()) == {0: 10, 2: 5}
    assert counts(harness.step()) == {0: 1, 2: 1, 1: 2}


@pytest.mark.parametrize("fails_after", [0, 3])
def test_no_block_of_a_failed_request_is_shared(fails_after: int) -> None:
    harness = make_harness(failing={0: fails_after}, max_batch_tokens=8)
    failed, later = make_request(0, range(12), 9), make_request(1, range(12), 2)
    for request in (failed, later):
        harness.add(request)
        harness.run()
    assert isinstance(harness.finished[0].outcome, RowError)
    assert failed.num_generated == fails_after
    assert later.cached_tokens == 0


def test_a_failed_request_is_not_found_by_those_that_come_after_while_another_still_uses_its_blocks() -> None:
    harness = make_harness(failing={0: 1})
    harness.add(make_request(0, range(9), 9), make_request(1, range(9), 9))
    while not harness.finished:
        harness.step()
    assert [request.request_id for request in harness.scheduler.active] == [1]
    later = make_request(2, range(9), 1)
    harness.add(later)
    harness.run()
    assert later.cached_tokens == 0


def test_requests_that_wait_for_a_prefix_go_on_when_its_request_fails() -> None:
    harness = make_harness(failing={0: 0}, max_batch_tokens=4)
    requests = [make_request(i, range(9), 2) for i in range(3)]
    harness.add(*requests)
    assert len(harness.run(max_steps=20)) == 3


def test_an_initialized_block_never_stands_in_the_way_of_a_new_request() -> None:
    harness = make_harness(num_chunks=5)
    for i in range(10):  # each fills the pool, which is full of its predecessors' blocks
        harness.add(make_request(i, distinct(i, 17), 4))
    assert len(harness.run()) == 10
    assert harness.num_soft_resets == 0


# A pool that is too small (E9, E14)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize(
    ("num_chunks", "page_size", "num_prompt", "max_tokens", "num_requests"),
    [
        (5, 16, 8, 70, 4),  # the least that holds one of them
        (10, 16, 8, 70, 4),  # two
        (16, 16, 100, 150, 20),
        (6, 16, 64, 20, 2),  # half as much again as one long prompt
        (8, 1, 3, 6, 12),
    ],
)
def test_a_starving_pool_gives_every_request_its_own_tokens_in_the_end(
    num_chunks: int, page_size: int, num_prompt: int, max_tokens: int, num_requests: int, sharing: bool
) -> None:
    harness = make_harness(num_chunks, page_size, max_batch_tokens=16, sharing=sharing)
    requests = [make_request(i, [1, 2, i, *[4] * (num_prompt - 3)], max_tokens) for i in range(num_requests)]
    harness.add(*requests)
    # One after the other would take this long.
    alone = sum(-(-r.num_prompt_tokens // 16) + r.max_tokens for r in requests)
    harness.run(max_steps=2 * alone)
    for request in requests:
        assert request.token_ids[num_prompt:] == completion(request.prompt.token_ids, max_tokens)
        assert request.preemptions <= num_requests
    assert harness.runner.num_computed == sum(r.computed_tokens + r.recomputed_tokens for r in requests)


def test_after_a_soft_reset_the_whole_history_is_computed_before_a_token_is_sampled() -> None:
    harness = make_harness(num_chunks=20, page_size=16, max_batch_tokens=64, sharing=False)
    older, newer = (make_request(i, [i, 2, 3], 300 if i else 310) for i in range(2))
    harness.add(older, newer)
    while not newer.preemptions:
        harness.step()
    assert newer.status is RequestStatus.PENDING
    assert newer.tables == [make_table()]
    history = newer.num_tokens
    assert history > 100
    while not older.status is RequestStatus.FINISHED:  # noqa: E714
        harness.step()
    chunks = [counts(harness.step())[1] for _ in range(-(-history // 64))]
    assert sum(chunks) == history
    assert newer.num_generated == history - 3 + 1
    harness.run()
    assert newer.token_ids[3:] == completion([1, 2, 3], 300)
    assert (newer.computed_tokens, newer.recomputed_tokens) == (302, history - 1)


def test_nothing_joins_in_a_step_in_which_an_active_request_starves() -> None:
    harness = make_harness(num_chunks=4, page_size=4, sharing=False)
    harness.add(make_request(0, distinct(0, 7), 9), make_request(1, distinct(1, 4), 9))
    harness.step()
    assert counts(harness.step()) == {0: 1, 1: 1}
    harness.add(make_request(2, distinct(2, 3), 1))
    assert counts(harness.step()) == {1: 1}  # the older one starved, and the younger one's tokens stand
    harness.run()


def test_a_request_joins_only_if_its_whole_prompt_has_room_beside_what_others_still_need() -> None:
    harness = make_harness(num_chunks=8, page_size=4, max_batch_tokens=8, sharing=False)
    harness.add(make_request(0, distinct(0, 24), 2), make_request(1, distinct(1, 9), 2), make_request(2, [1, 2], 2))
    harness.step()
    # Six blocks are free, but four of them are promised to the first: not enough for the second, and fifo is fifo.
    assert harness.cache.pool.num_free == 6
    assert [r.request_id for r in harness.scheduler.active] == [0]
    harness.run()
    assert harness.num_soft_resets == 0


def test_what_others_computed_while_a_request_was_out_counts_as_cached() -> None:
    cache = make_cache(AMPLE, 4)
    scheduler = FifoScheduler(cache, StepLimits(8, 8, AMPLE))
    runner = FakeRunner(cache)
    oldest, request, other = make_request(0, [99], 50), make_request(1, range(40), 5), make_request(2, range(40), 1)

    def run_until_finished(wanted: Request) -> None:
        while wanted.status is not RequestStatus.FINISHED:
            plan = scheduler.schedule(0.0)
            update(scheduler, runner, plan)

    scheduler.add(oldest)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    update(scheduler, runner, plan)
    assert (request.computed_tokens, request.cached_tokens) == (7, 0)
    scheduler._move_out_newest({request}, StepPlan())
    scheduler.waiting.remove(request)
    scheduler.add(other)
    run_until_finished(other)
    scheduler.add(request)
    run_until_finished(request)
    # 36 of the prompt's 40 tokens were found, 7 of them those that it had computed itself.
    assert (request.cached_tokens, request.computed_tokens, request.recomputed_tokens) == (29, 7 + 4 + 4, 0)


def test_a_request_that_joined_and_found_no_pages_left_to_read_was_not_scheduled_yet() -> None:
    # Twenty blocks hold all three, as nine of each one's ten are the same; but a step reads twenty pages at most.
    harness = make_harness(num_chunks=20, page_size=4, max_batch_tokens=64)
    harness.add(*(make_request(i, [*range(36), 100 + i], 3) for i in range(3)))
    harness.run()
    started = [f.request.scheduled_at for f in harness.finished]
    assert started == [0.0, 1.0, 3.0]
    assert harness.runner.num_computed == 36 + 3 * 3


# Cost (E5)


class CountingQueue(deque[Request]):
    """A million waiting requests, each made when it is looked at; whatever would look at all of them raises."""

    def __init__(self, num_requests: int) -> None:
        super().__init__()
        self._num_left = num_requests
        self.num_looked_at = 0

    def _fetch(self) -> None:
        if not super().__len__():
            self._num_left -= 1
            self.append(make_request(self._num_left, [*range(8), self._num_left], 3))

    def __len__(self) -> int:
        return super().__len__() + self._num_left

    def __bool__(self) -> bool:
        return len(self) > 0

    def __getitem__(self, index: SupportsIndex) -> Request:  # type: ignore[override]
        assert index == 0
        self._fetch()
        self.num_looked_at += 1
        return super().__getitem__(0)

    def popleft(self) -> Request:
        self._fetch()
        return super().popleft()

    def extendleft(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        self.num_looked_at += len(requests)
        super().extendleft(requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("looks at every waiting request")


def test_a_step_looks_at_as_many_waiting_requests_as_it_may_run_however_many_wait() -> None:
    max_requests = 8
    cache = make_cache(AMPLE, 4)
    scheduler = FifoScheduler(cache, StepLimits(64, max_requests, AMPLE))
    scheduler.waiting = CountingQueue(1_000_000)
    runner = FakeRunner(cache)
    num_finished = 0
    for _ in range(100):
        before = scheduler.waiting.num_looked_at
        plan = scheduler.schedule(0.0)
        num_finished += len(update(scheduler, runner, plan))
        assert scheduler.waiting.num_looked_at - before <= 3 * max_requests
    assert num_finished > 100
    assert len(scheduler.waiting) > 999_000


# Metrics


def outputs_of(harness: Harness) -> dict[int, tuple[Request, RequestOutput]]:
    return {f.request.request_id: (f.request, finished_output(f, harness.num_steps)) for f in harness.finished}


def test_times_hold_together_across_soft_resets() -> None:
    harness = make_harness(num_chunks=8, page_size=4, max_batch_tokens=8, failing={5: 2})
    for i in range(12):
        harness.add(make_request(i, distinct(i, 5), 1 + 2 * i, created_at=float(harness.num_steps)))
        harness.step()
    harness.run()
    assert harness.num_soft_resets > 0
    assert len(harness.finished) == 12
    for request, output in outputs_of(harness).values():
        metrics, times = output.metrics, list(request.token_times)
        assert request.scheduled_at is not None
        assert request.created_at <= request.scheduled_at < times[0]
        assert times == sorted(set(times))
        assert len(times) == len(output.token_ids) == request.num_generated
        assert metrics.queue_s == request.scheduled_at - request.created_at
        assert metrics.prefill_s == times[0] - request.scheduled_at
        assert metrics.preemptions == request.preemptions
        if len(times) > 1:
            assert metrics.itl_mean_s == pytest.approx((times[-1] - times[0]) / (len(times) - 1))
            assert metrics.itl_p99_s is not None
            assert metrics.itl_p99_s <= max(b - a for a, b in itertools.pairwise(times))
        else:
            assert (metrics.itl_mean_s, metrics.itl_p99_s) == (None, None)
        if output.error is None:
            assert metrics.e2e_s == times[-1] - request.created_at
        assert metrics.scheduled_at is not None


def test_a_soft_reset_leaves_the_first_tokens_time_and_the_start_as_they_were() -> None:
    harness = make_harness(num_chunks=5, page_size=4, sharing=False)
    older, newer = make_request(0, distinct(0, 5), 12), make_request(1, distinct(1, 5), 12)
    harness.add(older, newer)
    while not newer.preemptions:
        harness.step()
    assert newer.scheduled_at == 0.0
    times = list(newer.token_times)
    harness.run()
    assert newer.scheduled_at == 0.0
    assert list(newer.token_times)[: len(times)] == times
    assert len(newer.token_times) == 12


def test_a_request_that_fails_late_ends_when_it_fails() -> None:
    harness = make_harness(failing={0: 2})
    harness.add(make_request(0, [1, 2, 3], 9))
    harness.run()
    (finished,) = harness.finished
    output = finished_output(finished, now=7.0)
    assert (output.finish_reason, output.error) == ("error", finished.outcome)
    assert len(output.token_ids) == 2
    assert output.metrics.e2e_s == 7.0


def test_a_request_that_fails_before_its_first_token_has_no_token_times() -> None:
    harness = make_harness(failing={0: 0})
    harness.add(make_request(0, [1, 2, 3], 9))
    harness.run()
    metrics = finished_output(harness.finished[0], now=7.0).metrics
    assert (metrics.queue_s, metrics.prefill_s, metrics.itl_mean_s, metrics.e2e_s) == (0.0, None, None, 7.0)


def test_a_refused_prompt_has_its_error_and_no_times() -> None:
    error = RowError("prompt_too_long", "too long")
    output = failed_output(make_request(3, [1, 2], 1).prompt, error)
    assert (output.request_id, output.num_prompt_tokens, output.error) == (3, 2, error)
    assert (output.metrics.scheduled_at, output.metrics.e2e_s) == (None, None)


def test_each_request_ends_by_its_own_condition() -> None:
    prompts = [[i] for i in range(40)]
    harness = make_harness(max_requests=8)
    harness.add(*(make_request(i, prompt, 15, eos=True) for i, prompt in enumerate(prompts)))
    harness.run()
    reasons = set()
    for request, output in outputs_of(harness).values():
        assert output.token_ids == completion(prompts[request.request_id], 15, eos=True)
        assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")
        reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}


def test_an_items_sampling_is_decided_before_its_token_is_appended() -> None:
    harness = make_harness(num_chunks=8, page_size=4, max_batch_tokens=2)
    harness.add(make_request(0, [1, 2, 3], 2))
    plans = [harness.step() for _ in range(3)]
    assert [item.num_results for plan in plans for item in plan.items] == [0, 1, 1]


def test_dropping_what_waits_keeps_what_has_begun() -> None:
    harness = make_harness(num_chunks=5, page_size=4, sharing=False)
    harness.add(*(make_request(i, distinct(i, 5), 12) for i in range(2)))
    while not harness.num_soft_resets:
        harness.step()
    fresh = make_request(2, distinct(2, 3), 1)
    harness.scheduler.add(fresh)
    assert harness.scheduler.drop_waiting() == [fresh]
    assert [r.request_id for r in harness.scheduler.waiting] == [1]
    assert {f.request.request_id for f in harness.run()} == {0, 1}
    assert toy_model([1]) in range(7)
