"""A forward pass that finds no memory: the batch shrinks, and nobody notices but the log and the counts."""

from __future__ import annotations

import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.batch import StepInputs
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.results import LaunchedStep
from cbatch.engine.runner import ModelRunner
from cbatch.engine.step import StepPlan
from cbatch.errors import EngineError
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.tiny_models import build_tiny

MAX_BATCH_TOKENS = 32


def cuda_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_error() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def windows_error() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to")


def python_error() -> None:
    raise MemoryError


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory)


def load_tiny(family: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = EngineConfig(model=str(build_tiny(family, tmp_path_factory.mktemp(family))), dtype="float32")
    return load_model(config, inspect_model(config))


def make_engine(loaded: LoadedModel, **settings: object) -> Engine:
    given = {"page_size": 4, "num_blocks": 22, "max_batch_tokens": MAX_BATCH_TOKENS, "safety_margin": 0.0} | settings
    return Engine.over(loaded, EngineConfig(model="tiny", **given))  # type: ignore[arg-type]


def make_prompts() -> list[Prompt]:
    rng = random.Random(5)
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    return [Prompt(i, [rng.randrange(3, 250) for _ in range(9 + 2 * i)], params) for i in range(6)]


def run(engine: Engine) -> list[RequestOutput]:
    return sorted(engine.generate(make_prompts()), key=lambda output: output.request_id)


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine._runner, ModelRunner)
    return engine._runner


def fail_after_forward(engine: Engine, fails: Callable[[StepInputs], None]) -> None:
    """Let the model write its KV, then call `fails` as if the logits found no room."""
    runner = runner_of(engine)
    forward = runner._forward

    def forward_then_fail(inputs: StepInputs) -> Tensor:
        logits = forward(inputs)
        fails(inputs)
        return logits

    runner._forward = forward_then_fail  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [cuda_error, cpu_error, windows_error, python_error])
def test_whatever_memory_ran_out_the_step_runs_in_a_smaller_batch(
    llama: LoadedModel, error: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(make_engine(llama))
    engine = make_engine(llama)
    failures = iter([True])
    fail_after_forward(engine, lambda _: error() if next(failures, False) else None)
    with caplog.at_level(logging.WARNING):
        outputs = run(engine)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert engine.stats.out_of_memory_steps == 1
    (warning,) = caplog.messages
    assert str(MAX_BATCH_TOKENS // 2) in warning


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("cpu_offload_space", [0.0, 1e-3])
@pytest.mark.parametrize("moment", ["before the moves", "in the moves", "in the forward pass"])
def test_nothing_is_lost_or_doubled_whenever_it_fails(
    loaded: LoadedModel, moment: str, cpu_offload_space: float, scheduler_type: str
) -> None:
    """A pool that is too small, so that steps that fail have moves to carry out, or have carried them out."""
    settings = {"cpu_offload_space": cpu_offload_space, "scheduler_type": scheduler_type}
    calm = make_engine(loaded, **settings)
    expected = run(calm)
    engine = make_engine(loaded, **settings)
    plans = fail_where_pages_move(engine, moment)
    outputs = run(engine)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    stats = engine.stats
    num_failures = 3 if cpu_offload_space else 2
    assert stats.out_of_memory_steps == num_failures
    assert len(plans) == stats.steps
    assert (stats.offloads if cpu_offload_space else stats.soft_resets) > 0
    assert stats.offloads == stats.restores
    assert stats.preemptions == sum(o.metrics.preemptions for o in outputs)
    assert stats.output_tokens == calm.stats.output_tokens
    assert stats.computed_tokens + stats.cached_tokens == calm.stats.computed_tokens + calm.stats.cached_tokens
    assert all(plan.num_tokens == sum(item.num_tokens for item in plan.items) for plan in plans)
    assert engine._cache.usage == 0
    assert engine._scheduler.limits.max_batch_tokens == MAX_BATCH_TOKENS >> num_failures


def fail_where_pages_move(engine: Engine, moment: str) -> list[StepPlan]:
    """Fail twice at steps that move requests out and once at one that brings some back; give the plans that ran."""
    runner, failures, ran = runner_of(engine), Counter(out=2, back=1), list[StepPlan]()
    run_step, move_pages = runner.launch, runner._move_pages

    def run_or_fail(plan: StepPlan) -> LaunchedStep:
        moves = plan.moves
        kind = "back" if moves.num_restores else "out" if moves.num_offloads + moves.num_soft_resets else "none"
        if failures[kind] > 0:
            failures[kind] -= 1
            if moment == "in the moves" and moves.out:
                # The keys were copied and the values were not: as good as nothing.
                runner.host_key_pages[moves.out.host_pages] = runner.key_pages[moves.out.cache_pages]
            elif moment == "in the moves":
                move_pages(moves)
            elif moment == "in the forward pass":
                left, read = list(moves.out.cache_pages), list(moves.back.host_pages)
                run_step(plan)
                # What was copied is no longer needed where it came from, and others may have written there since.
                in_use = {page for r in engine._scheduler.active for page in engine._cache.pages_in_use(r)}
                runner.key_pages[[page for page in left if page not in in_use]] = float("nan")
                runner.host_key_pages[read] = float("nan")
            cuda_error()
        launched = run_step(plan)
        ran.append(plan)
        return launched

    runner.launch = run_or_fail  # type: ignore[method-assign]
    return ran


def test_a_limit_that_always_fails_is_left_for_good_and_the_job_ends(loaded: LoadedModel) -> None:
    expected = run(make_engine(loaded))
    engine = make_engine(loaded)
    ran: list[int] = []

    def fail_above_five(inputs: StepInputs) -> None:
        if inputs.input_ids.shape[1] > 5:
            cuda_error()
        ran.append(inputs.input_ids.shape[1])

    fail_after_forward(engine, fail_above_five)
    assert [o.token_ids for o in run(engine)] == [o.token_ids for o in expected]
    assert engine.stats.out_of_memory_steps == 3  # 32, 16, 8
    assert max(ran) == 4


def test_a_single_token_that_finds_no_memory_ends_the_run_with_a_way_out(llama: LoadedModel) -> None:
    engine = make_engine(llama)
    fail_after_forward(engine, lambda _: cuda_error())
    with pytest.raises(EngineError, match="memory") as caught:
        run(engine)
    assert "num_blocks" in (caught.value.hint or "")
    assert caught.value.__context__ is None
    assert engine.stats.out_of_memory_steps == 6  # 32, 16, 8, 4, 2, 1


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no"), IndexError("no")])
def test_other_failures_are_not_mistaken_for_it(llama: LoadedModel, error: Exception) -> None:
    engine = make_engine(llama)

    def fail(_: StepInputs) -> None:
        raise error

    fail_after_forward(engine, fail)
    with pytest.raises(type(error)) as caught:
        run(engine)
    assert caught.value is error
    assert engine.stats.out_of_memory_steps == 0


def test_the_tensors_of_the_failed_step_are_gone_before_it_is_tried_again(llama: LoadedModel) -> None:
    engine = make_engine(llama)
    failed: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def failing() -> Iterator[bool]:
        yield False
        yield True

    failures = failing()

    def fail(_: StepInputs) -> None:
        alive.extend(reference() is not None for reference in failed)
        if next(failures, False):
            activations = torch.zeros(1000)
            failed.append(weakref.ref(activations))
            cuda_error()

    fail_after_forward(engine, fail)
    run(engine)
    assert alive
    assert not any(alive)


def test_a_halved_plan_keeps_the_first_half_of_its_tokens(llama: LoadedModel) -> None:
    engine = make_engine(llama, num_blocks=200)
    scheduler = engine._scheduler
    for prompt in make_prompts():
        engine._submit(prompt)
    plan = scheduler.schedule(0.0)
    assert plan.num_tokens == MAX_BATCH_TOKENS
    half = scheduler.halve(plan)
    assert half.num_tokens == MAX_BATCH_TOKENS // 2 == sum(item.num_tokens for item in half.items)
    assert half.moves is plan.moves
    for kept, planned in zip(half.items, plan.items, strict=False):
        assert kept.request is planned.request
        assert kept.num_tokens <= planned.num_tokens
    assert half.num_pages_read < plan.num_pages_read
