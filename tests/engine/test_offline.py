"""The offline scheduler: rows by prefix group, longest first, and room kept for what they will grow to."""

from __future__ import annotations

import random

import pytest

from cbatch.engine.prefix_groups import PrefixGroupQueue
from cbatch.engine.request import Request
from cbatch.engine.step import StepLimits
from tests.engine.fakes import Harness, completion, make_cache, make_request

PAGE_SIZE = 4
AMPLE = 10_000


def make_harness(num_blocks: int = AMPLE, *, max_requests: int = 64, policy: str = "offline") -> Harness:
    return Harness(make_cache(num_blocks, PAGE_SIZE), StepLimits(512, max_requests, AMPLE), policy=policy)


def in_group(request_id: int, group: int, length: int, max_tokens: int) -> Request:
    """A request whose first 32 tokens are its group's."""
    header = [random.Random(group).randrange(100, 200) for _ in range(32)]
    own = [random.Random(1000 + request_id).randrange(200, 300) for _ in range(length)]
    return make_request(request_id, header + own, max_tokens)


def start_order(harness: Harness, requests: list[Request]) -> list[int]:
    harness.add(*requests)
    harness.run()
    started = sorted(requests, key=lambda request: request.scheduled_at or 0.0)
    return [request.request_id for request in started]


def test_without_shared_prefixes_the_longest_expected_goes_first() -> None:
    lengths = [5, 60, 7, 30, 11, 60]
    requests = [make_request(i, [500 + i] * 9, max_tokens=n) for i, n in enumerate(lengths)]
    assert start_order(make_harness(max_requests=1), requests) == [1, 5, 3, 4, 2, 0]


def test_a_group_is_taken_to_its_end_longest_first_and_the_group_with_the_longest_row_before_the_others() -> None:
    rows = [(0, 5), (1, 9), (0, 50), (1, 8), (2, 20), (0, 3), (2, 30)]
    requests = [in_group(i, group, 6, max_tokens) for i, (group, max_tokens) in enumerate(rows)]
    assert start_order(make_harness(max_requests=1), requests) == [2, 0, 5, 6, 4, 1, 3]


def test_interleaved_groups_are_computed_once_each_where_fifo_evicts_and_computes_them_again() -> None:
    def cached(policy: str) -> int:
        requests = [in_group(i, i % 6, 6, 4) for i in range(36)]
        harness = make_harness(32, max_requests=2, policy=policy)
        start_order(harness, requests)
        for request in requests:
            expected = completion(request.prompt.token_ids, 4)
            assert request.token_ids[request.num_prompt_tokens :] == expected
        return sum(request.cached_tokens for request in requests)

    most = 30 * 32  # of each group's six all but the first
    assert cached("offline") > 0.95 * most  # a block may go where one group follows another
    assert cached("fifo") < 0.6 * most


def test_room_for_what_requests_grow_to_is_kept_so_that_none_is_preempted() -> None:
    def moves(policy: str) -> int:
        harness = make_harness(24, policy=policy)
        start_order(harness, [make_request(i, [500 + i] * 8, max_tokens=24) for i in range(12)])
        return harness.num_soft_resets

    assert moves("fifo") > 0
    assert moves("offline") == 0


def test_rows_that_end_early_teach_how_much_room_the_next_need() -> None:
    requests = [make_request(i, [700 + i] * 8, max_tokens=200, eos=True) for i in range(60)]
    assert sum(len(completion(r.token_ids, 200, eos=True)) for r in requests) / 60 < 40
    harness = make_harness(60)
    harness.add(*requests)
    most_active = []
    while harness.scheduler.has_work:
        harness.step()
        most_active.append(len(harness.scheduler.active))
    assert max(most_active[:3]) == 1  # 208 tokens of 240
    assert max(most_active) > 3


def test_what_was_sent_back_goes_before_all_groups() -> None:
    queue = PrefixGroupQueue(lambda request: [], lambda request: request.max_tokens)
    for i, max_tokens in enumerate([3, 9, 5]):
        queue.append(make_request(i, [1], max_tokens))
    assert queue[0].request_id == 1
    back = queue.popleft()
    queue.append(make_request(7, [1], 99))
    queue.appendleft(back)
    queue.extendleft([make_request(8, [1], 1), make_request(9, [1], 1)])
    assert {request.request_id for request in queue} == {0, 1, 2, 7, 8, 9}
    assert [queue.popleft().request_id for _ in range(3)] == [9, 8, 1]
    assert len(queue) == 3
    queue.clear()
    assert not queue


@pytest.mark.parametrize("seed", range(3))
def test_the_queue_hands_out_everything_once_whatever_comes_in_between(seed: int) -> None:
    rng = random.Random(seed)
    queue = PrefixGroupQueue(lambda r: [bytes([r.token_ids[0]])], lambda request: request.max_tokens)
    taken: list[int] = []
    for request_id in range(500):
        queue.append(make_request(request_id, [rng.randrange(9)], rng.randrange(1, 50)))
        while queue and rng.random() < 0.45:
            taken.append(queue.popleft().request_id)
    taken += [queue.popleft().request_id for _ in range(len(queue))]
    assert sorted(taken) == list(range(500))


def test_dropping_waiting_rows_keeps_those_that_were_out_already() -> None:
    harness = make_harness(max_requests=1)
    requests = [in_group(i, 0, 5, 9) for i in range(4)]
    harness.add(*requests)
    harness.step()
    scheduler = harness.scheduler
    running = scheduler.active[0]
    dropped = scheduler.drop_waiting()
    assert {r.request_id for r in dropped} == {0, 1, 2, 3} - {running.request_id}
    assert not scheduler.waiting
