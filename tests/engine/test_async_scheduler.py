"""Steps that are scheduled before the results of the one before them are there: no torch, no model.

The fake runner computes a step as late as it can, when its results are collected, out of what was known when it was
launched and of what the step before it chose. Whatever is freed, shared or moved too early shows as wrong content.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from cbatch.engine.cache.allocator import make_table
from cbatch.engine.cache.build import group_layers
from cbatch.engine.history import TokenHistory
from cbatch.engine.modes import CHUNKED, MODES
from cbatch.engine.record import LogprobRecord
from cbatch.engine.request import Request
from cbatch.engine.step import StepLimits
from cbatch.errors import RowError
from tests.engine.fakes import Harness, completion, make_cache, make_request
from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, Case, check_results, hybrid

AMPLE = 1_000


def make_harness(num_chunks: int = AMPLE, *, page_size: int = 4, ahead: bool = True, **settings: object) -> Harness:
    limits = StepLimits(64, 8, max_pages_read=num_chunks)
    cache = make_cache(num_chunks, page_size)
    return Harness(cache, limits, most_in_flight=int(ahead), **settings)  # type: ignore[arg-type]


def ends_early(length: int) -> list[int]:
    """A prompt whose completion is that long, and ends by itself."""
    rng = random.Random(length)
    prompts = ([rng.randrange(1, 7) for _ in range(6)] for _ in itertools.count())
    return next(prompt for prompt in prompts if len(completion(prompt, 30, eos=True)) == length)


def generated(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def test_a_step_is_scheduled_before_the_tokens_of_the_last_one_are_known() -> None:
    harness = make_harness()
    request = make_request(0, [1, 2, 3], 5)
    harness.add(request)
    seen = []
    while harness.scheduler.has_work:
        harness.step()
        seen.append((len(generated(request)), request.num_pending))
    # The fifth token was expected, so that no sixth was begun.
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 0)]
    assert generated(request) == completion([1, 2, 3], 5)
    assert harness.runner.num_carried == 4
    assert harness.num_dropped == 0


def test_a_request_that_turns_out_finished_leaves_no_trace_in_the_step_in_flight() -> None:
    plain, ahead = make_harness(ahead=False), make_harness()
    for harness in (plain, ahead):
        harness.add(make_request(0, ends_early(5), 30, eos=True), make_request(1, [5, 5], 12))
        harness.run()
    assert ahead.num_dropped == 1
    for one, other in zip(plain.finished, ahead.finished, strict=True):
        assert other.outcome == one.outcome
        assert other.request.token_ids == one.request.token_ids
        assert len(other.request.token_times) == len(one.request.token_times)
        assert other.request.computed_tokens == one.request.computed_tokens
    # What the dropped step wrote is no block that anybody may find.
    index = [h.cache.allocators[0].index for h in (plain, ahead)]  # type: ignore[attr-defined]
    assert set(index[0]._block_of) == set(index[1]._block_of)


def test_a_row_that_fails_takes_its_share_of_the_step_in_flight_with_it() -> None:
    harness = make_harness(failing={0: 3})
    requests = [make_request(i, [i, 1, 2], 9) for i in range(2)]
    harness.add(*requests)
    outcomes = {f.request.request_id: f.outcome for f in harness.run()}
    assert isinstance(outcomes[0], RowError)
    assert generated(requests[0]) == completion([0, 1, 2], 9)[:3]
    assert generated(requests[1]) == completion([1, 1, 2], 9)
    assert harness.num_dropped == 1


@pytest.mark.parametrize("needs", ["penalties", "grammar"])
def test_who_needs_its_last_token_on_the_host_waits_for_it_and_others_do_not(needs: str) -> None:
    harness = make_harness()
    careful, *others = [make_request(i, [i, 1, 2], 10) for i in range(4)]
    if needs == "penalties":
        careful.history = TokenHistory([], counts_prompt=False)
    else:
        careful.constraint = object()  # type: ignore[assignment]
    harness.add(careful, *others)
    plans = []
    while harness.scheduler.has_work:
        assert careful.num_pending <= 1
        plans.append([item.request.request_id for item in harness.step().items])
    assert plans[:4] == [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]
    assert all(generated(r) == completion(r.prompt.token_ids, 10) for r in (careful, *others))


def test_where_most_must_wait_nobody_runs_ahead() -> None:
    """Else the batch would fall into two halves for ever, each step as slow as one of all."""
    harness = make_harness()
    requests = [make_request(i, [i, 1, 2], 10) for i in range(4)]
    for request in requests[:2]:
        request.history = TokenHistory([], counts_prompt=False)
    harness.add(*requests)
    sizes = []
    while harness.scheduler.has_work:
        sizes.append(len(harness.step().items))
    assert [size for size in sizes if size] == [4] * 10


def test_a_prompt_that_is_scored_goes_on_once_its_scores_are_there() -> None:
    harness = make_harness()
    harness.limits = harness.scheduler.limits = replace(harness.limits, max_batch_tokens=4)
    request = make_request(0, range(6), 3)
    request.logprobs = LogprobRecord(None, 0)
    harness.add(request)
    while harness.scheduler.has_work:
        plan = harness.scheduler.schedule(0.0)
        assert not (plan.items and request.scores_prompt and request.num_in_flight), "its scores are not counted yet"
        if not plan.items:
            harness._finish()
            continue
        harness._in_flight.append((plan, harness.runner.launch(plan)))
        harness.scheduler.launch(plan)
        while request.logprobs.num_scored < min(5, request.num_computed_tokens):
            request.logprobs.add_prompt(0.0, [])
        if len(harness._in_flight) > 1:
            harness._finish()
    assert generated(request) == completion(range(6), 3)


@pytest.mark.parametrize("num_host_pages", [0, 40])
def test_nobody_moves_out_of_the_cache_while_a_step_computes_it(num_host_pages: int) -> None:
    harness = make_harness(9, page_size=2, num_host_pages=num_host_pages)
    requests = [make_request(i, [i, 1, 2], 12) for i in range(4)]
    harness.add(*requests)
    while harness.scheduler.has_work:
        active = list(harness.scheduler.active)
        in_flight = {r for r in active if r.num_in_flight}
        harness.step()
        assert in_flight.isdisjoint(harness.scheduler.waiting)
    assert harness.num_offloads + harness.num_soft_resets > 0
    assert all(generated(r) == completion(r.prompt.token_ids, 12) for r in requests)


def test_samples_of_one_prompt_share_it_once_it_is_computed() -> None:
    harness = make_harness()
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    requests = [make_request(i, prompt, 8) for i in range(4)]
    harness.add(*requests)
    harness.run()
    assert [r.cached_tokens for r in requests] == [0, 8, 8, 8]
    assert all(generated(r) == completion(prompt, 8) for r in requests)


def test_blocks_of_an_answer_are_found_only_once_all_of_its_tokens_are_known() -> None:
    harness = make_harness(page_size=2)
    first = make_request(0, [1, 2, 3], 9)
    harness.add(first)
    index = harness.cache.allocators[0].index  # type: ignore[attr-defined]
    while harness.scheduler.has_work:
        harness.step()
        assert len(index) <= max(0, len(first.token_ids) - 1) // 2
    assert len(index) == (3 + 9 - 1) // 2


def test_requests_that_were_dropped_or_given_up_are_nobodys_with_a_step_in_flight() -> None:
    harness = make_harness()
    harness.add(*(make_request(i, [i, 1, 2], 9) for i in range(12)))
    harness.step()
    harness.step()
    assert harness.scheduler.num_in_flight == 1
    dropped = harness.scheduler.drop_waiting()
    assert [r.request_id for r in dropped] == [8, 9, 10, 11]
    for request in dropped:
        del harness._requests[request.request_id]
    harness.step()
    harness.scheduler.abandon()
    assert harness.cache.usage == 0
    assert not harness.scheduler.has_work
    # Another run over the same cache, its first step behind one that nobody asks for any more.
    again = Harness(harness.cache, harness.limits, most_in_flight=1)
    again.runner._pages = harness.runner._pages
    request = make_request(20, [1, 1, 2], 9)
    again.add(request)
    again.run()
    assert generated(request) == completion([1, 1, 2], 9)


def test_a_place_that_is_certain_to_be_free_is_given_at_once() -> None:
    """Rows of a single token would else have every step wait for the one before it."""
    harness = make_harness()
    requests = [make_request(i, [i % 7, i // 7, 1], 1) for i in range(24)]
    harness.add(*requests)
    plans = []
    while harness.scheduler.has_work:
        plans.append(len(harness.step().items))
    assert plans == [8, 8, 8, 0]
    assert all(generated(r) == completion(r.prompt.token_ids, 1) for r in requests)


def test_an_ending_is_known_beforehand_where_it_is_the_limit() -> None:
    harness = make_harness()
    harness.add(*(make_request(i, [i, 1], 1 + i) for i in range(6)))
    harness.run()
    assert harness.num_dropped == 0
    assert harness.num_steps == 7


@pytest.mark.parametrize("seeds", [range(30), range(30, 60)])
def test_every_token_is_the_models_whatever_comes(seeds: range) -> None:
    """Small pools, failures, endings, prefixes, offloads, requests that must wait: everything checked at every step."""
    totals = dict.fromkeys(("resets", "offloads", "cached", "failed", "dropped", "carried", "careful"), 0)
    for seed in seeds:
        case, rng = Case(seed), random.Random(seed)
        harness = case.harness()
        harness.most_in_flight, harness.drains = 1, rng if seed % 3 == 0 else None
        careful = [r for r in case.requests if rng.random() < 0.2]
        for request in careful:
            request.history = TokenHistory([], counts_prompt=False)
        coming = list(case.requests)
        while coming or harness.scheduler.has_work:
            for _ in range(case.rng.randrange(4)):
                if coming:
                    harness.add(coming.pop(0))
            if harness.scheduler.has_work:
                assert harness.num_steps < 5_000, f"seed {seed} does not end"
                harness.step()
            assert all(r.num_pending <= 1 for r in careful)
        harness.run()
        check_results(case, harness)
        counts = (harness.num_soft_resets, harness.num_offloads, sum(r.cached_tokens for r in case.requests))
        counts += (len(case.failing), harness.num_dropped, harness.runner.num_carried, len(careful))
        totals = {name: total + count for (name, total), count in zip(totals.items(), counts, strict=True)}
    assert all(totals.values()), f"the cases are too tame: {totals}"


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != CHUNKED])
def test_every_mode_may_run_ahead(mode: str) -> None:
    for seed in range(10):
        case = Case(seed)
        harness = replace(case.harness(), mode=MODES[mode], most_in_flight=1)
        harness.add(*case.requests)
        harness.run(5_000)
        check_results(case, harness)


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "offline"])
def test_hybrid_caches_and_every_policy(policy: str) -> None:
    totals = {"resets": 0, "offloads": 0, "dropped": 0}
    for seed in range(12):
        case, rng = Case(seed), random.Random(seed)
        windows = [rng.choice([None, 3, 3, 8]) for _ in range(rng.randrange(1, 5))]
        for request in case.requests:
            request.tables = [make_table() for _ in group_layers(windows, MAX_MODEL_LEN)]
        longest = max(r.num_prompt_tokens + r.max_tokens - 1 for r in case.requests)
        cache = next(c for n in itertools.count(1) if (c := hybrid(case, windows, n)).max_tokens_ever >= longest)
        all_pages = cache.pool.num_usable * cache.pool.pages_per_chunk
        limits = replace(case.limits, max_requests_per_batch=8, max_pages_read=all_pages)
        harness = Harness(cache, limits, case.failing, policy, num_host_pages=rng.choice([0, 20, 100]))
        harness.most_in_flight = 1
        harness.add(*case.requests)
        harness.run(5_000)
        check_results(case, harness)
        totals["resets"] += harness.num_soft_resets
        totals["offloads"] += harness.num_offloads
        totals["dropped"] += harness.num_dropped
    if policy == "offline":  # whose requests hardly ever move out
        assert totals.pop("resets") + totals.pop("offloads") == 0
    assert all(totals.values()), f"the cases are too tame: {totals}"
