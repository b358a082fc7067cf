"""What defines each way to batch, on the toy model; and that the tokens are the same in all of them, on a tiny one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.modes import CHUNKED, CONTINUOUS, MODES, NAIVE, STATIC
from cbatch.engine.request import Prompt
from cbatch.engine.step import StepLimits, StepPlan
from tests.engine.fakes import Harness, completion, make_cache, make_request
from tests.engine.tiny_engine import load_tiny, make_tokens
from tests.tiny_models import build_tiny

ALL = pytest.mark.parametrize("name", MODES)
WHOLE = pytest.mark.parametrize("name", [NAIVE, STATIC, CONTINUOUS])


def make_harness(
    name: str,
    *,
    max_batch_tokens: int = 16,
    max_requests: int = 4,
    num_blocks: int = 1_000,
    sharing: bool = False,
    safety_margin: float = 0.0,
    num_host_pages: int = 0,
) -> Harness:
    limits = StepLimits(max_batch_tokens, max_requests, max_pages_read=num_blocks)
    cache = make_cache(num_blocks, 4, sharing=sharing)
    return Harness(cache, limits, safety_margin=safety_margin, num_host_pages=num_host_pages, mode=MODES[name])


def counts(plan: StepPlan) -> dict[int, int]:
    return {item.request.request_id: item.num_tokens for item in plan.items}


def steps_of(harness: Harness, *shapes: tuple[int, int]) -> list[dict[int, int]]:
    """Run one request for each (prompt tokens, output tokens); give every step's tokens by request."""
    harness.add(*(make_request(i, [i + 10] * prompt, output) for i, (prompt, output) in enumerate(shapes)))
    steps = []
    while harness.scheduler.has_work:
        steps.append(counts(harness.step()))
    return steps


def test_naive_runs_one_request_after_the_other() -> None:
    steps = steps_of(make_harness(NAIVE), (3, 2), (20, 3), (1, 1))
    assert steps == [{0: 3}, {0: 1}, {1: 20}, {1: 1}, {1: 1}, {2: 1}]


def test_a_static_batch_waits_for_its_slowest() -> None:
    steps = steps_of(make_harness(STATIC, max_requests=2), (3, 2), (3, 4), (3, 1), (3, 3))
    assert steps == [{0: 3, 1: 3}, {0: 1, 1: 1}, {1: 1}, {1: 1}, {2: 3, 3: 3}, {3: 1}, {3: 1}]


def test_a_static_batch_computes_all_of_its_prompts_before_anything_else() -> None:
    steps = steps_of(make_harness(STATIC, max_batch_tokens=8), (6, 2), (6, 2), (2, 2), (20, 2), (3, 1))
    assert steps == [{0: 6}, {1: 6, 2: 2}, {3: 20}, {0: 1, 1: 1, 2: 1, 3: 1}, {4: 3}]


def test_a_static_batch_takes_in_who_waited_for_a_prefix_of_it() -> None:
    harness = make_harness(STATIC, sharing=True)
    harness.add(*(make_request(i, [*range(8), 100 + i], 3) for i in range(3)), make_request(3, [7] * 3, 3))
    steps = [counts(harness.step()) for _ in range(3)]
    assert steps == [{0: 9, 3: 3}, {1: 1, 2: 1}, {0: 1, 3: 1, 1: 1, 2: 1}]


def test_continuous_batching_lets_the_next_one_join_at_once() -> None:
    steps = steps_of(make_harness(CONTINUOUS, max_requests=2), (3, 2), (3, 4), (3, 1), (3, 3))
    assert steps == [{0: 3, 1: 3}, {0: 1, 1: 1}, {1: 1, 2: 3}, {1: 1, 3: 3}, {3: 1}, {3: 1}]


@WHOLE
def test_a_prompt_beyond_the_budget_is_computed_in_one_step(name: str) -> None:
    assert steps_of(make_harness(name, max_batch_tokens=4), (50, 2)) == [{0: 50}, {0: 1}]


def test_the_budget_bounds_the_number_of_whole_prompts_which_is_one_at_least() -> None:
    steps = steps_of(make_harness(CONTINUOUS, max_batch_tokens=10), (4, 9), (5, 9), (2, 9), (30, 9))
    assert steps[:3] == [{0: 4, 1: 5}, {0: 1, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 1, 3: 30}]


def test_nobody_passes_a_prompt_that_found_no_place_in_the_step() -> None:
    steps = steps_of(make_harness(CONTINUOUS, max_batch_tokens=10), (6, 1), (6, 1), (2, 1))
    assert steps == [{0: 6}, {1: 6, 2: 2}]


def test_decodes_beyond_the_budget_stop_no_prompt() -> None:
    steps = steps_of(make_harness(CONTINUOUS, max_batch_tokens=2, max_requests=4), (2, 9), (2, 9), (2, 9), (5, 9))
    assert steps[3] == {0: 1, 1: 1, 2: 1, 3: 5}


def test_chunked_is_the_engines_own_way() -> None:
    assert steps_of(make_harness(CHUNKED, max_batch_tokens=4), (10, 2), (3, 2)) == [
        {0: 4},
        {0: 4},
        {0: 2, 1: 2},
        {0: 1, 1: 1},
        {1: 1},
    ]


@ALL
def test_every_mode_ends_with_the_toy_models_tokens_however_small_the_cache(name: str) -> None:
    num_preempted = 0
    for seed in range(25):
        rng = random.Random(seed)
        header = [rng.randrange(7) for _ in range(rng.randrange(20))]
        requests = [
            make_request(i, [*header, *(rng.randrange(7) for _ in range(1 + rng.randrange(20)))], 1 + rng.randrange(20))
            for i in range(rng.randrange(1, 12))
        ]
        longest = max(r.num_prompt_tokens + r.max_tokens for r in requests)
        harness = make_harness(
            name,
            max_batch_tokens=rng.choice([1, 4, 16]),
            num_blocks=-(-longest // 4) + rng.randrange(6),
            sharing=rng.random() < 0.5,
            safety_margin=rng.choice([0.0, 0.15]),
            num_host_pages=rng.choice([0, 8]),
        )
        harness.add(*requests)
        num_split = 0
        while harness.scheduler.has_work:
            assert harness.num_steps < 5_000, f"seed {seed} does not end"
            plan = harness.step()
            num_split += sum(
                item.num_computed_before + item.num_tokens < item.request.num_prompt_tokens for item in plan.items
            )
        harness.run()
        assert num_split == 0 or name == CHUNKED
        for request in requests:
            generated = request.token_ids[request.num_prompt_tokens :]
            assert generated == completion(request.prompt.token_ids, request.max_tokens)
        num_preempted += sum(r.preemptions for r in requests)
    assert (num_preempted > 0) == (name != NAIVE)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model that attends to everything, and one with sliding windows, whose ring must hold a whole prompt."""
    return build_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_all_modes_give_the_same_tokens(folder: Path) -> None:
    loaded = load_tiny(folder)
    config = EngineConfig(model="tiny", page_size=4, num_blocks=200, max_batch_tokens=16, max_requests_per_batch=4)
    prompts = [
        Prompt(i, make_tokens(3 + 17 * i % 90, seed=i), SamplingParams(max_tokens=2 + i % 5, ignore_eos=True))
        for i in range(12)
    ]
    answers, steps = {}, {}
    for name, mode in MODES.items():
        engine = Engine.over(loaded, config, mode)
        answers[name] = {output.request_id: output.token_ids for output in engine.generate(prompts)}
        steps[name] = engine.stats.steps
    assert all(len(answers[CHUNKED][prompt.request_id]) == prompt.sampling.max_tokens for prompt in prompts)
    assert all(answers[name] == answers[CHUNKED] for name in MODES)
    assert steps[NAIVE] == sum(prompt.sampling.max_tokens or 0 for prompt in prompts)
    assert steps[CONTINUOUS] < steps[STATIC] < steps[NAIVE]
