"""Drafts: where they come from, when a step takes them, and that no request can tell. No model is needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cbatch.engine.cache.allocator import make_table
from cbatch.engine.cache.build import group_layers
from cbatch.engine.speculation import LEAST_MATCH, MAX_CANDIDATES, MAX_DRAFTS, MAX_READ, PromptLookup, accept
from cbatch.engine.step import StepLimits, StepPlan
from cbatch.errors import RowError
from tests.engine.fakes import VOCAB_SIZE, Harness, completion, make_cache, make_request
from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, Case, check_results, hybrid

# Where drafts come from


def plain_drafts(tokens: list[int], most: int) -> tuple[int, ...]:
    """The longest of the latest matches, by looking at everything."""
    ends = [i for i in range(1, len(tokens) - 1) if tokens[i - 1 : i + 1] == tokens[-2:]][::-1][:MAX_CANDIDATES]
    best, longest = 0, 0
    for end in ends:
        length = LEAST_MATCH
        while length < MAX_DRAFTS and length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length > longest:
            best, longest = end, length
    drafts: list[int] = []
    while len(drafts) < min(longest, most):
        drafts.append([*tokens, *drafts][best + 1 + len(drafts)])
    return tuple(drafts)


@pytest.mark.parametrize("num_words", [2, 3, 30])
def test_drafts_are_what_followed_the_longest_match(num_words: int) -> None:
    rng = random.Random(num_words)
    lengths = set()
    for _ in range(60):
        tokens = [rng.randrange(num_words) for _ in range(rng.randrange(1, 30))]
        lookup = PromptLookup()
        for _ in range(40):
            most = rng.randrange(1, 2 * MAX_DRAFTS)
            drafts = lookup.propose(tokens, most)
            assert drafts == plain_drafts(tokens, most)
            lengths.add(len(drafts))
            copied = tokens[len(tokens) // 3 : len(tokens) // 3 + rng.randrange(1, 6)]
            tokens += copied if rng.random() < 0.5 else [rng.randrange(num_words)]
    assert {0, LEAST_MATCH, MAX_DRAFTS} <= lengths


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    assert PromptLookup().propose([1, 2, 3, 1, 2, 3, 1, 2], 6) == (3, 1, 2, 3, 1)
    assert PromptLookup().propose([5] * 20, 99) == (5,) * MAX_DRAFTS


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 1]])
def test_what_never_came_before_gives_no_drafts(tokens: list[int]) -> None:
    assert PromptLookup().propose(tokens, 9) == ()


def test_a_look_up_costs_the_same_however_long_the_text() -> None:
    class Counting(list[int]):
        num_reads = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
            self.num_reads += 1
            return super().__getitem__(place)

    tokens = Counting([1, 2, 3] * 5_000)
    lookup = PromptLookup()
    for _ in range(len(tokens) // MAX_READ):
        tokens.num_reads = 0
        assert lookup.propose(tokens, 8) == ()
        assert tokens.num_reads <= 2 * MAX_READ
    lookup.propose(tokens, 8)
    for i in range(100):
        tokens.append(1 + i % 3)
        tokens.num_reads = 0
        assert len(lookup.propose(tokens, 8)) == MAX_DRAFTS
        assert tokens.num_reads < 2 * MAX_CANDIDATES * MAX_DRAFTS + 20


@pytest.mark.parametrize(
    ("drafts", "results", "taken"),
    [
        ((), [4], [4]),
        ((4, 5), [4, 5, 6], [4, 5, 6]),
        ((4, 5), [4, 9, 6], [4, 9]),
        ((4, 5), [3, 5, 6], [3]),
    ],
)
def test_a_result_counts_if_all_drafts_before_it_are_right(
    drafts: tuple[int, ...], results: list[int], taken: list[int]
) -> None:
    assert accept(drafts, results) == taken


def test_a_failure_counts_only_behind_drafts_that_are_right() -> None:
    failure = RowError("failed", "so")
    assert accept((4, 5), [4, failure, 6]) == [4, failure]
    assert accept((4, 5), [9, failure, 6]) == [9]
    assert accept((4,), [failure, 6]) == [failure]


# When a step takes them


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are mostly right: the toy model's own, with a wrong one in it now and then."""

    def propose(_: PromptLookup, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        rng = random.Random(len(tokens))
        drafts = completion(tokens, min(most, MAX_DRAFTS))
        wrong = rng.randrange(2 * MAX_DRAFTS)
        return tuple((token + 1) % VOCAB_SIZE if i == wrong else token for i, token in enumerate(drafts))

    monkeypatch.setattr(PromptLookup, "propose", propose)


def make_harness(num_chunks: int = 50, **limits: int) -> Harness:
    given = {"max_batch_tokens": 64, "max_requests_per_batch": 16, "max_pages_read": 1000, "max_tokens_with_drafts": 16}
    return Harness(make_cache(num_chunks, page_size=4), StepLimits(**(given | limits)))


def drafts_of(plan: StepPlan) -> list[int]:
    return [len(item.drafts) for item in plan.items]


@pytest.mark.usefixtures("knowing")
def test_the_room_of_a_step_is_shared_and_counted() -> None:
    harness = make_harness(max_tokens_with_drafts=12)
    harness.add(*(make_request(i, [i, 2, 3], 30) for i in range(4)))
    assert drafts_of(harness.step()) == [0] * 4, "prompts have none"
    plan = harness.step()
    assert drafts_of(plan) == [2, 2, 2, 2]
    assert (plan.num_tokens, plan.num_decode_tokens, plan.num_logits) == (12, 12, 12)


@pytest.mark.usefixtures("knowing")
@pytest.mark.parametrize(
    ("limits", "drafts"),
    [
        ({"max_batch_tokens": 5}, [2, 1]),
        ({"max_requests_per_batch": 4}, [1, 1]),
        ({"max_requests_per_batch": 2}, [0, 0]),
        ({"max_tokens_with_drafts": 0}, [0, 0]),
        ({"max_tokens_with_drafts": 2}, [0, 0]),
        ({"max_pages_read": 4}, [5, 5]),
        ({"max_pages_read": 3}, [5, 0]),
    ],
)
def test_every_limit_of_a_step_counts_drafts(limits: dict[str, int], drafts: list[int]) -> None:
    harness = make_harness(**({"max_tokens_with_drafts": 12} | limits))
    harness.add(make_request(0, [1, 2], 30), make_request(1, [2, 3], 30))
    harness.step()
    plan = harness.step()
    assert drafts_of(plan) == drafts
    assert plan.num_pages_read <= limits.get("max_pages_read", 1000)


@pytest.mark.usefixtures("knowing")
def test_prompts_go_before_drafts() -> None:
    harness = make_harness(max_tokens_with_drafts=20)
    harness.add(make_request(0, [1, 2], 30))
    harness.step()
    harness.add(make_request(1, [3] * 15, 30))
    plan = harness.step()
    assert [(item.request.request_id, item.num_tokens) for item in plan.items] == [(0, 5), (1, 15)]
    assert plan.num_decode_tokens == 5


@pytest.mark.usefixtures("knowing")
@pytest.mark.parametrize(("num_chunks", "drafts"), [(2, [0, 3]), (3, [4])])
def test_drafts_leave_every_request_its_next_block(num_chunks: int, drafts: list[int]) -> None:
    """Pages of four: the first decoded token ends a page, so that drafts need another one."""
    harness = make_harness(num_chunks=num_chunks)
    harness.add(make_request(0, [1, 2, 3], 6))
    harness.step()
    assert [drafts_of(harness.step())[0] for _ in drafts] == drafts


@pytest.mark.usefixtures("knowing")
def test_nothing_is_drafted_while_a_request_starves() -> None:
    harness = make_harness(num_chunks=6, max_tokens_with_drafts=30)
    harness.add(*(make_request(i, [i, 2, 3], 14) for i in range(3)))
    while harness.scheduler.has_work:
        num_moved = harness.num_soft_resets
        plan = harness.step()
        assert harness.num_soft_resets == num_moved or not any(drafts_of(plan))
    assert harness.num_soft_resets > 0


@pytest.mark.usefixtures("knowing")
def test_there_are_no_drafts_behind_the_last_token() -> None:
    harness = make_harness(max_tokens_with_drafts=40)
    request = make_request(0, [1, 2], 6)
    harness.add(request)
    while harness.scheduler.has_work:
        plan = harness.step()
        assert max(drafts_of(plan)) <= 5
    assert len(request.token_ids) == 8
    assert request.num_computed_tokens == 7


@pytest.mark.usefixtures("knowing")
def test_tokens_of_one_step_have_one_time_and_their_blocks_are_shared_afterwards() -> None:
    harness = make_harness(max_tokens_with_drafts=9)
    first = make_request(0, [1, 2, 3, 4], 25)
    harness.add(first)
    harness.run()
    assert harness.num_steps < 15
    assert len(first.token_times) == 25
    assert len(set(first.token_times)) == harness.num_steps
    assert list(first.token_times) == sorted(first.token_times)
    again = make_request(1, [*first.token_ids, 5], 2)
    harness.add(again)
    harness.run()
    assert again.cached_tokens == 28, "all blocks of the 28 tokens that have KV"


# Nobody can tell


@pytest.mark.parametrize("are_known", [True, False], ids=["mostly right", "looked up"])
def test_every_request_gets_its_own_tokens_whatever_is_drafted(are_known: bool, request: pytest.FixtureRequest) -> None:
    if are_known:
        request.getfixturevalue("knowing")
    totals = {"resets": 0, "offloads": 0, "cached": 0, "failed": 0, "accepted": 0, "rejected": 0}
    for seed in range(60):
        case = Case(seed)
        case.limits = replace(case.limits, max_tokens_with_drafts=case.rng.choice([4, 8, 64]))
        harness = case.harness()
        coming = list(case.requests)
        while coming or harness.scheduler.has_work:
            for _ in range(case.rng.randrange(4)):
                if coming:
                    harness.add(coming.pop(0))
            if harness.scheduler.has_work:
                assert harness.num_steps < 5_000, f"seed {seed} does not end"
                harness.step()
        check_results(case, harness)
        totals["resets"] += harness.num_soft_resets
        totals["offloads"] += harness.num_offloads
        totals["cached"] += sum(r.cached_tokens for r in case.requests)
        totals["failed"] += len(case.failing)
        totals["accepted"] += harness.runner.num_accepted
        totals["rejected"] += harness.runner.num_drafted - harness.runner.num_accepted
    assert all(totals.values()), f"the cases are too tame: {totals}"


@pytest.mark.usefixtures("knowing")
def test_windows_keep_what_is_needed_behind_drafts_that_were_wrong() -> None:
    """Drafts go into the ring, and what they overwrite there is out of the window whichever of them are right."""
    totals = {"moved": 0, "accepted": 0, "rejected": 0}
    for seed in range(40):
        case = Case(seed)
        rng = random.Random(seed)
        windows = [rng.choice([None, 1, 3, 8]) for _ in range(rng.randrange(1, 5))]
        for request in case.requests:
            request.tables = [make_table() for _ in group_layers(windows, MAX_MODEL_LEN)]
        case.limits = StepLimits(rng.choice([2, 5, 40]), 8, 0, max_tokens_with_drafts=rng.choice([4, 8, 64]))
        longest = max(r.num_prompt_tokens + r.max_tokens - 1 for r in case.requests)
        cache = next(c for n in itertools.count(1) if (c := hybrid(case, windows, n)).max_tokens_ever >= longest)
        limits = replace(case.limits, max_pages_read=cache.pool.num_usable * cache.pool.pages_per_chunk)
        harness = Harness(cache, limits, case.failing, case.policy, 0.0, rng.choice([0, 20, 100]))
        harness.add(*case.requests)
        harness.run(5_000)
        check_results(case, harness)
        totals["moved"] += harness.num_soft_resets + harness.num_offloads
        totals["accepted"] += harness.runner.num_accepted
        totals["rejected"] += harness.runner.num_drafted - harness.runner.num_accepted
    assert all(totals.values()), f"the cases are too tame: {totals}"
