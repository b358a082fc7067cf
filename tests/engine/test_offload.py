"""Who moves out of a full cache, when, to where, and that all of it comes back: scheduling alone, then real tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.cache.build import build_cache
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.engine import Engine
from cbatch.engine.output import finished_output
from cbatch.engine.request import Prompt, Request, RequestStatus
from cbatch.engine.runner import ModelRunner
from cbatch.engine.sizing import page_bytes
from cbatch.engine.step import StepLimits, StepPlan
from cbatch.errors import RowError
from cbatch.models.inspect import inspect_model
from cbatch.models.load import load_model
from cbatch.units import GIB
from tests.engine.fakes import Harness, completion, make_cache, make_request
from tests.tiny_models import build_tiny

PAGE_SIZE = 4
AMPLE = 1_000


def make_harness(
    num_chunks: int,
    *,
    num_host_pages: int = AMPLE,
    max_batch_tokens: int = 64,
    max_requests: int = 8,
    sharing: bool = False,
    policy: str = "fifo",
    safety_margin: float = 0.0,
    num_layers: int = 1,
) -> Harness:
    return Harness(
        make_cache(num_chunks, PAGE_SIZE, num_layers=num_layers, sharing=sharing),
        StepLimits(max_batch_tokens, max_requests, max_pages_read=AMPLE),
        policy=policy,
        safety_margin=safety_margin,
        num_host_pages=num_host_pages,
    )


def with_prompts(harness: Harness, *lengths: int, max_tokens: int = 20) -> list[Request]:
    """Requests that share nothing, of prompts of these lengths."""
    requests = [make_request(i, [10 + i] * length, max_tokens) for i, length in enumerate(lengths)]
    harness.add(*requests)
    return requests


def ran(plan: StepPlan) -> list[int]:
    return [item.request.request_id for item in plan.items]


def ids(requests: object) -> list[int]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def all_tokens_right(requests: list[Request]) -> bool:
    return all(r.token_ids == r.prompt.token_ids + completion(r.prompt.token_ids, r.max_tokens) for r in requests)


# A batch stands, but some starve


def test_the_newest_of_the_starved_move_and_as_few_as_cover_the_need_of_the_rest() -> None:
    harness = make_harness(num_chunks=6)
    # 3 has a slot left in its block; the others need a block each, and the newest of them holds two.
    requests = with_prompts(harness, 4, 4, 8, 7, max_tokens=16)
    assert ran(harness.step()) == [0, 1, 2, 3]
    plan = harness.step()
    assert ran(plan) == [3, 0, 1]
    assert (plan.moves.num_offloads, plan.moves.num_soft_resets) == (1, 0)
    assert ids(harness.scheduler.active) == [0, 1, 3]
    assert ids(harness.scheduler.waiting) == [2]
    harness.run()
    assert all_tokens_right(requests)


def test_those_in_the_batch_keep_their_cache_however_new_they_are() -> None:
    harness = make_harness(num_chunks=4)
    with_prompts(harness, 4, 4, 4, 3)
    harness.step()
    newest = harness.scheduler.active[-1]
    table = newest.tables[0][:]
    plan = harness.step()
    # Two move, for the block that the first needs is free only when the third is out, and the second's when it is.
    assert ran(plan) == [3, 0]
    assert ids(harness.scheduler.active) == [0, 3]
    assert newest.tables[0] == table


def test_one_that_starves_alone_moves_though_it_is_the_oldest() -> None:
    harness = make_harness(num_chunks=2)
    with_prompts(harness, 4, 3)
    harness.step()
    assert ran(harness.step()) == [1]
    assert ids(harness.scheduler.waiting) == [0]


def test_all_that_moves_in_a_step_is_one_transfer_of_the_pages_that_hold_tokens() -> None:
    harness = make_harness(num_chunks=6, max_batch_tokens=64)
    with_prompts(harness, 4, 8, 8, 3)
    harness.step()
    tables = {r.request_id: list(r.tables[0]) for r in harness.scheduler.active}
    plan = harness.step()
    moved = sorted(set(tables) - set(ids(harness.scheduler.active)))
    assert sorted(plan.moves.out.cache_pages) == sorted(page for i in moved for page in tables[i])
    assert len(set(plan.moves.out.host_pages)) == len(plan.moves.out)
    assert plan.moves.num_offloads == len(moved)


@pytest.mark.parametrize("num_in_last", [0, 1, 3])
def test_a_block_without_a_token_is_not_copied_and_one_with_a_token_is(num_in_last: int) -> None:
    harness = make_harness(num_chunks=9, max_batch_tokens=4)
    _, second = with_prompts(harness, 16, 4)
    while second.num_computed_tokens == 0 or second.num_computed_tokens % PAGE_SIZE != num_in_last:
        harness.step()
    # As at a step whose forward pass failed: the table has grown, and no token came.
    assert harness.cache.extend(second, 12)
    plan = StepPlan()
    computed = second.num_computed_tokens
    harness.scheduler.offload.move_out(second, plan.moves)
    assert len(plan.moves.out) == -(-computed // PAGE_SIZE) < 3


# Nothing can be scheduled at all


def test_where_all_starve_they_move_until_a_batch_fits() -> None:
    harness = make_harness(num_chunks=3)
    requests = with_prompts(harness, 4, 4, 4, max_tokens=8)
    harness.step()
    plan = harness.step()
    assert ran(plan) == [0]
    assert ids(harness.scheduler.active) == [0]
    assert ids(harness.scheduler.waiting) == [1, 2]
    assert plan.moves.num_offloads == 2
    harness.run()
    assert all_tokens_right(requests)


@pytest.mark.parametrize("num_host_pages", [0, 1, 2, AMPLE])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
def test_the_last_active_request_never_moves(num_host_pages: int, policy: str) -> None:
    # The least that holds one of them.
    harness = make_harness(num_chunks=6, num_host_pages=num_host_pages, policy=policy)
    requests = with_prompts(harness, 4, 4, 4, 4, 3, 2, 1)
    while harness.scheduler.has_work:
        before = list(harness.scheduler.active)
        harness.step()
        still = [r for r in before if r.status is not RequestStatus.PENDING]
        assert still or not before, "all that were active have moved out"
    assert all_tokens_right(requests)


def test_those_that_moved_out_come_back_in_their_order_before_any_that_never_ran() -> None:
    harness = make_harness(num_chunks=4)
    requests = with_prompts(harness, 4, 4, 4, 4, max_tokens=6)
    harness.step()
    late = make_request(9, [99], 1)
    harness.add(late)
    harness.step()
    assert ids(harness.scheduler.waiting) == [2, 3, 9]
    started = []
    while harness.scheduler.has_work:
        started += [i for i in ran(harness.step()) if i not in started]
    assert started.index(2) < started.index(3) < started.index(9)
    assert all_tokens_right(requests)


# To the host, or by a soft reset


def test_a_restore_computes_nothing_again() -> None:
    harness = make_harness(num_chunks=8)
    requests = with_prompts(harness, 5, 6, 7, 8, max_tokens=20)
    harness.run()
    assert harness.num_offloads > 0
    assert harness.num_soft_resets == 0
    for request in requests:
        assert request.computed_tokens == request.num_prompt_tokens + 19
        assert (request.recomputed_tokens, request.cached_tokens) == (0, 0)
    assert sum(request.preemptions for request in requests) == harness.num_offloads
    assert all_tokens_right(requests)


def test_what_does_not_fit_the_host_is_reset_beside_what_does() -> None:
    harness = make_harness(num_chunks=4, num_host_pages=1)
    requests = with_prompts(harness, 4, 4, 4, 3, max_tokens=12)
    harness.step()
    plan = harness.step()
    assert (plan.moves.num_offloads, plan.moves.num_soft_resets) == (1, 1)
    kept, reset = requests[2], requests[1]  # the newest moved first and took the page
    assert (len(kept.host_pages), kept.num_computed_tokens) == (1, 4)
    assert (reset.host_pages, reset.num_computed_tokens) == ([], 0)
    assert harness.scheduler.offload.num_free_host_pages == 0
    harness.run()
    assert harness.scheduler.offload.num_free_host_pages == 1
    assert all_tokens_right(requests)


def test_a_reset_request_resumes_where_it_was_and_says_what_it_computed_twice() -> None:
    harness = make_harness(num_chunks=6, num_host_pages=0)
    requests = with_prompts(harness, 5, 6, max_tokens=16)
    harness.run()
    assert harness.num_soft_resets > 0
    assert harness.runner.num_computed == sum(r.computed_tokens + r.recomputed_tokens for r in requests)
    for request in requests:
        assert request.computed_tokens == request.num_prompt_tokens + 15
        assert (request.recomputed_tokens > 0) == (request.preemptions > 0)
    assert all_tokens_right(requests)


@pytest.mark.parametrize("num_host_pages", [AMPLE, 0])
def test_two_long_requests_that_come_back_together_do_not_hold_each_other_up(num_host_pages: int) -> None:
    """Each takes more than half of the cache: room is promised for all of a request's tokens, or it does not join."""
    harness = make_harness(num_chunks=10, num_host_pages=num_host_pages, max_batch_tokens=4)
    requests = with_prompts(harness, 16, 16, max_tokens=16)
    harness.run(max_steps=2 * (4 + 16) + 16)
    assert sum(request.preemptions for request in requests) <= 2
    assert all_tokens_right(requests)


def test_a_preempted_long_prompt_is_not_resumed_chunk_by_chunk_for_nothing() -> None:
    """Two prompts, and half as much again as one of them needs: each chunk that is computed once is kept."""
    harness = make_harness(num_chunks=24, num_host_pages=0, max_batch_tokens=16)
    requests = with_prompts(harness, 60, 60, max_tokens=4)
    harness.run(max_steps=2 * (4 + 4))
    assert sum(request.recomputed_tokens for request in requests) == 0
    assert all_tokens_right(requests)


@pytest.mark.parametrize("num_host_pages", [AMPLE, 0])
def test_most_of_the_batch_does_not_stall_under_pressure(num_host_pages: int) -> None:
    """Room for two, eight active: at every step a resident request runs, or has moved out to make room."""
    harness = make_harness(num_chunks=16, num_host_pages=num_host_pages)
    requests = with_prompts(harness, *[4] * 8, max_tokens=28)
    while harness.scheduler.has_work:
        plan = harness.step()
        stalled = [r for r in harness.scheduler.active if r not in [item.request for item in plan.items]]
        assert not [r for r in stalled if r.status is not RequestStatus.FINISHED]
    assert all_tokens_right(requests)
    assert harness.num_steps < 8 * 28 / 2


# Shared blocks


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_request_that_shares_blocks_moves_all_of_its_pages_and_brings_back_what_is_not_there(num_layers: int) -> None:
    harness = make_harness(num_chunks=7, sharing=True, num_layers=num_layers)
    header = list(range(3 * PAGE_SIZE))
    requests = [make_request(i, [*header, 50 + i], 12) for i in range(2)]
    harness.add(*requests)
    while not harness.num_offloads:
        plan = harness.step()
    (moved,) = (request for request in requests if request.host_pages)
    assert len(plan.moves.out) == len(moved.host_pages) == 5 * num_layers
    while not harness.num_restores:
        plan = harness.step()
    assert 0 < len(plan.moves.back) <= 2 * num_layers, "the header is still there"
    harness.run()
    assert all_tokens_right(requests)
    assert [request.cached_tokens for request in requests] == [0, len(header)]
    assert sum(request.recomputed_tokens for request in requests) == 0


def test_a_header_that_was_demoted_meanwhile_comes_back_from_the_host() -> None:
    harness = make_harness(num_chunks=10, sharing=True)
    header = list(range(3 * PAGE_SIZE))
    sharers = [make_request(i, [*header, 50 + i], 9) for i in range(2)]
    harness.add(*sharers)
    for _ in range(4):
        harness.step()
    plan = StepPlan()
    for request in sharers:
        harness.scheduler.active.remove(request)
        harness.scheduler.offload.move_out(request, plan.moves)
    assert len(plan.moves.out) == 8
    harness.runner.run(plan)
    harness.num_offloads += 2
    filler = make_request(2, [99] * 36, 4)
    harness.add(filler)
    harness.scheduler.waiting.extend(sharers)
    harness.step()
    assert not harness.cache.allocators[0].index.match(sharers[0].block_hashes)  # type: ignore[attr-defined]
    harness.run()
    assert all_tokens_right([*sharers, filler])
    assert sum(request.recomputed_tokens for request in sharers) == 0
    assert [request.computed_tokens for request in sharers] == [13 + 8, 1 + 8]


def test_what_moved_out_comes_back_though_others_have_computed_more_of_it_meanwhile() -> None:
    harness = make_harness(num_chunks=40, sharing=True, max_batch_tokens=8)
    moves, passes = (make_request(i, range(30), 20) for i in range(2))
    harness.add(moves)
    harness.step()
    plan = StepPlan()
    harness.scheduler.active.remove(moves)
    harness.scheduler.offload.move_out(moves, plan.moves)
    harness.runner.run(plan)
    harness.num_offloads += 1
    harness.add(passes)
    harness.scheduler.waiting.append(moves)
    harness.scheduler.limits = replace(harness.limits, max_requests_per_batch=1)
    harness.run()
    assert all_tokens_right([moves, passes])
    assert (moves.recomputed_tokens, harness.num_restores) == (0, 1)


def test_blocks_of_a_prompt_that_moved_out_half_prefilled_are_never_found_with_other_content() -> None:
    """The toy model looks at every slot that is read; the headers are the same and the blocks are used anew."""
    harness = make_harness(num_chunks=14, num_host_pages=0, sharing=True, max_batch_tokens=8)
    header = list(range(8))
    other = make_request(0, [99] * 4, 30)
    long = make_request(1, [*header, *[7] * 32], 3)
    harness.add(other, long)
    for _ in range(3):
        harness.step()
    assert 0 < long.num_computed_tokens < long.num_prompt_tokens
    harness.scheduler.active.remove(long)
    harness.scheduler.offload.move_out(long, StepPlan().moves)
    again, fresh = make_request(2, [*header, 1, 2, 3], 5), make_request(3, long.prompt.token_ids, 3)
    harness.add(fresh, again)
    harness.scheduler.waiting.append(long)
    harness.run()
    assert all_tokens_right([other, long, again, fresh])


# Margin and policies


def test_new_requests_wait_while_less_than_the_margin_is_free_and_decodes_go_on() -> None:
    harness = make_harness(num_chunks=20, safety_margin=0.5)
    requests = with_prompts(harness, 20, 24, 4, max_tokens=8)
    assert ran(harness.step()) == [0, 1]  # eleven blocks of twenty
    before = [request.num_generated for request in requests]
    assert ran(harness.step()) == [0, 1]
    assert [request.num_generated for request in requests] == [before[0] + 1, before[1] + 1, 0]
    harness.run()
    assert all_tokens_right(requests)


def test_a_margin_of_zero_lets_the_cache_be_filled() -> None:
    harness = make_harness(num_chunks=10)
    with_prompts(harness, 20, 20, max_tokens=1)
    harness.step()
    assert harness.num_steps == 1
    assert len(harness.finished) == 2


def test_a_request_joins_an_empty_cache_whatever_the_margin() -> None:
    harness = make_harness(num_chunks=10, safety_margin=0.99)
    requests = with_prompts(harness, 36, 30, 2, max_tokens=4)
    harness.run(max_steps=12)
    assert all_tokens_right(requests)


def test_cached_blocks_count_as_free_to_the_margin() -> None:
    harness = make_harness(num_chunks=20, safety_margin=0.5, sharing=True)
    with_prompts(harness, 60, max_tokens=1)
    harness.step()
    assert harness.cache.allocators[0].num_free_blocks >= 15
    later = [make_request(i, [50 + i] * 8, 2) for i in (7, 8)]
    harness.add(*later)
    assert ran(harness.step()) == [7, 8]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fifo", [[0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]]),
        ("prefill_first", [[0], [0, 1], [1], [1], [1, 0], [0, 1]]),
    ],
)
def test_prefill_first_completes_a_split_prompt_before_decoding_resumes(policy: str, expected: list[list[int]]) -> None:
    harness = make_harness(AMPLE, policy=policy, max_batch_tokens=8)
    with_prompts(harness, 8, 30)
    assert [ran(harness.step()) for _ in range(6)] == expected


def test_with_prefill_first_a_row_that_is_prefilled_decodes_soon_however_many_prompts_come() -> None:
    harness = make_harness(AMPLE, policy="prefill_first", max_batch_tokens=8, max_requests=6)
    requests = with_prompts(harness, *[17] * 40, max_tokens=3)
    harness.run()
    # At most one prompt is split at a time: its three chunks are all that comes between two tokens.
    for request in requests:
        gaps = [b - a for a, b in zip(request.token_times, request.token_times[1:], strict=False)]
        assert max(gaps) <= 4


# Times and counts across moves


def test_times_hold_together_across_offloads() -> None:
    harness = make_harness(num_chunks=8, max_batch_tokens=8)
    for i in range(10):
        harness.add(make_request(i, [10 + i] * 5, 2 + 2 * i, created_at=float(harness.num_steps)))
        harness.step()
    harness.run()
    assert harness.num_offloads > 0
    for finished in harness.finished:
        request, metrics = finished.request, finished_output(finished, harness.num_steps).metrics
        times = list(request.token_times)
        assert request.scheduled_at is not None
        assert request.created_at <= request.scheduled_at < times[0]
        assert times == sorted(set(times))
        assert len(times) == request.num_generated
        assert metrics.prefill_s == times[0] - request.scheduled_at
        assert metrics.e2e_s == times[-1] - request.created_at
        assert metrics.preemptions == request.preemptions


@pytest.mark.parametrize("layout", [[None, None], [4, None]], ids=["full", "sliding"])
@pytest.mark.parametrize("num_host_pages", [AMPLE, 0], ids=["offload", "soft reset"])
@pytest.mark.parametrize("max_batch_tokens", [5, 500], ids=["chunked", "whole"])
@pytest.mark.parametrize("sharing", [True, False], ids=["sharing", "alone"])
def test_all_of_sharing_chunking_moves_and_windows_together(
    sharing: bool, max_batch_tokens: int, num_host_pages: int, layout: list[int | None]
) -> None:
    cache = build_cache(
        layout,
        num_blocks=14,
        page_size=PAGE_SIZE,
        max_batch_tokens=max_batch_tokens,
        max_model_len=64,
        allow_block_sharing=sharing,
    )
    harness = Harness(cache, StepLimits(max_batch_tokens, 8, AMPLE), num_host_pages=num_host_pages)
    requests = [
        make_request(i, [*range(9), *[30 + i] * (i % 7)], 12 + i % 5, num_types=len(cache.allocators))
        for i in range(20)
    ]
    harness.add(*requests)
    harness.run(max_steps=1_000)
    assert all_tokens_right(requests)
    assert (harness.num_offloads > 0) == (num_host_pages > 0)
    assert (harness.num_soft_resets > 0) == (num_host_pages == 0)
    found = sum(request.cached_tokens for request in requests)
    assert (found > 0) == (sharing and layout == [None, None])


# An adversary

LAYOUTS: list[list[int | None]] = [[None], [None] * 2, [4], [4, None], [4, 4, 9, None, None]]
LONGEST = 40  # tokens that the pool holds, and hardly more


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adversary_never_brings_it_to_a_halt(layout: list[int | None]) -> None:
    """Tiny pools, any host pool, steps that fail, requests that fail, bursts: it always ends."""
    totals = {"offloads": 0, "resets": 0, "failed": 0}
    for seed in range(10):
        rng = random.Random(seed)
        harness = random_harness(rng, layout)
        let_steps_fail(harness, rng)
        num_tokens = 0
        for request in random_requests(rng, harness):
            num_tokens += request.num_prompt_tokens + request.max_tokens
            harness.add(request)
            for _ in range(rng.choice([0, 0, 0, 1, 5, 20])):
                if harness.scheduler.has_work:
                    harness.step()
        # Every step computes a token; one that is computed again was moved out before.
        harness.run(max_steps=4 * num_tokens)
        assert harness.num_offloads + harness.num_soft_resets <= harness.num_steps
        totals["offloads"] += harness.num_offloads
        totals["resets"] += harness.num_soft_resets
        totals["failed"] += sum(isinstance(f.outcome, RowError) for f in harness.finished)
        for request in (f.request for f in harness.finished):
            expected = completion(request.prompt.token_ids, request.max_tokens)
            assert request.token_ids[request.num_prompt_tokens :] == expected[: harness.failing.get(request.request_id)]
    assert all(totals.values()), f"the cases are too tame: {totals}"


def random_harness(rng: random.Random, layout: list[int | None]) -> Harness:
    page_size, max_batch_tokens, sharing = rng.choice([1, 2, 4]), rng.choice([1, 5, 30]), rng.random() < 0.5

    def make(num_blocks: int) -> CacheManager:
        return build_cache(
            layout,
            num_blocks=num_blocks,
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            max_model_len=64,
            allow_block_sharing=sharing,
        )

    cache = next(made for n in range(1, 500) if (made := make(n)).max_tokens_ever >= LONGEST)
    pages = cache.pool.num_usable * cache.pool.pages_per_chunk
    return Harness(
        cache,
        StepLimits(max_batch_tokens, rng.randrange(3, 12), pages),
        policy=rng.choice(["fifo", "prefill_first", "fifo", "prefill_first", "offline"]),
        safety_margin=rng.choice([0.0, 0.15, 0.6]),
        num_host_pages=rng.choice([0, pages // 4, pages, 10 * pages]),
    )


def random_requests(rng: random.Random, harness: Harness) -> Iterator[Request]:
    for request_id in range(40):
        prompt = [rng.randrange(2) for _ in range(rng.choice([rng.randrange(1, 6), rng.randrange(1, LONGEST - 1)]))]
        max_tokens = rng.randrange(1, LONGEST - len(prompt) + 2)
        if rng.random() < 0.1:
            harness.failing[request_id] = rng.randrange(max_tokens)
        yield make_request(request_id, prompt, max_tokens, num_types=len(harness.cache.allocators))


def let_steps_fail(harness: Harness, rng: random.Random) -> None:
    """Make some steps run out of memory, so that only half of them runs."""
    scheduler, schedule = harness.scheduler, harness.scheduler.schedule
    failures = [rng.randrange(200) for _ in range(3)]

    def schedule_and_fail(now: float) -> StepPlan:
        plan = schedule(now)
        harness._started |= {item.request.request_id: now for item in plan.items if item.request.scheduled_at == now}
        for _ in range(failures.count(int(now))):
            plan = scheduler.halve(plan)
        return plan

    scheduler.schedule = schedule_and_fail  # type: ignore[method-assign]


# Real tensors


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_byte_comes_back(family: str, tmp_path: Path) -> None:
    """Also of requests that share blocks, and of rings: what its tokens left in all layers, before and after."""
    engine = tiny_engine(family, tmp_path, num_blocks=26)
    runner, scheduler = engine._runner, engine._scheduler
    assert isinstance(runner, ModelRunner)
    rng = random.Random(1)
    header = [rng.randrange(3, 250) for _ in range(3 * PAGE_SIZE)]
    for row in range(6):
        tokens = [*header, *(rng.randrange(3, 250) for _ in range(1 + row))]
        engine._submit(Prompt(row, tokens, SamplingParams(max_tokens=30, ignore_eos=True)))
    left: dict[int, list[Tensor]] = {}
    num_compared = num_shared = 0
    while scheduler.has_work:
        was_out = {r.request_id for r in scheduler.waiting if r.host_pages}
        contents = {r.request_id: content(runner, engine, r) for r in scheduler.active}
        plan = scheduler.schedule(0.0)
        left |= {r.request_id: contents[r.request_id] for r in scheduler.waiting if r.request_id in contents}
        num_brought_back = len(plan.moves.back)
        runner._move_pages(plan.moves)
        for request in [r for r in scheduler.active if r.request_id in was_out]:
            found = content(runner, engine, request)
            assert len(found) == len(left[request.request_id])
            for now, before in zip(found, left[request.request_id], strict=True):
                assert torch.equal(now, before)
            num_compared += 1
            num_shared += num_brought_back < len(found)
        running = runner.launch(plan)
        scheduler.launch(plan)
        scheduler.update(plan, running.collect(), 0.0)
    assert num_compared > 2
    assert (num_shared > 0) == (family == "llama")


def content(runner: ModelRunner, engine: Engine, request: Request) -> list[Tensor]:
    """Keys and values [2, kv_heads, page_size, head_dim] of each page that holds computed tokens, copied."""
    pages = [
        block + layer * engine._cache.pool.num_chunks
        for allocator, table in zip(engine._cache.allocators, request.tables, strict=True)
        for block in table[: -(-request.num_computed_tokens // PAGE_SIZE)]  # a ring has fewer
        for layer in range(len(allocator.layers))
    ]
    filled = [torch.stack([runner.key_pages[page], runner.value_pages[page]]) for page in pages]
    if len(engine._cache.allocators) == 1:
        # Slots behind the last token hold whatever was there.
        num_layers = engine._cache.pages_per_block(0)
        for page in filled[-num_layers:] if request.num_computed_tokens % PAGE_SIZE else []:
            page[:, :, request.num_computed_tokens % PAGE_SIZE :] = 0
    return filled


def tiny_engine(family: str, folder: Path, num_blocks: int) -> Engine:
    config = EngineConfig(model=str(build_tiny(family, folder)), dtype="float32")
    loaded = load_model(config, inspect_model(config))
    page = page_bytes(loaded.shape, loaded.dtype, PAGE_SIZE)
    config = EngineConfig(
        model=family,
        page_size=PAGE_SIZE,
        num_blocks=num_blocks,
        max_batch_tokens=16,
        safety_margin=0.0,
        cpu_offload_space=100 * loaded.shape.num_layers * page / GIB,
    )
    return Engine.over(loaded, config)
