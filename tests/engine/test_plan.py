"""How the engine's open settings are answered: in any combination, within the memory, each with its reason."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cbatch_kernels.dispatch import AttentionChoice

from cbatch.config import EngineConfig
from cbatch.engine.plan import EnginePlan, check_config, plan_engine
from cbatch.engine.policies import FifoScheduler
from cbatch.engine.sizing import longest_context, page_bytes, step_footprint
from cbatch.engine.step import StepLimits
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.models.inspect import ModelShape, inspect_model
from cbatch.models.load import LoadedModel, load_model
from cbatch.models.memory import FreeMemory
from cbatch.units import GIB, MIB, ceil_div
from tests.engine.fakes import make_cache, make_request
from tests.engine.test_sizing import make_shape
from tests.tiny_models import build_tiny

GIVEN = {"num_blocks": 50, "max_memory_percent": 0.5, "max_batch_tokens": 100, "max_requests_per_batch": 20}
SUBSETS = [names for count in range(len(GIVEN) + 1) for names in itertools.combinations(GIVEN, count)]
SMALL = make_shape()  # SmolLM2-135M
LARGE = make_shape(  # Llama 3 8B
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    context_length=131072,
    sliding_windows=(None,) * 32,
)
HYBRID = make_shape(  # Gemma 3 270M
    num_layers=18,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    hidden_size=640,
    intermediate_size=2048,
    vocab_size=262144,
    context_length=32768,
    sliding_windows=((512,) * 5 + (None,)) * 3,
)


ATTENTION = AttentionChoice("an implementation", "a reason", gathers=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = EngineConfig(model=str(build_tiny("llama", tmp_path_factory.mktemp("llama"))), dtype="float32")
    return load_model(config, inspect_model(config))


def make_plan(
    loaded: LoadedModel, shape: ModelShape, num_bytes: float, *, device: str = "cpu", **settings: object
) -> EnginePlan:
    config = EngineConfig(model="tiny", **settings)  # type: ignore[arg-type]
    known = {"dtype": torch.bfloat16, "device": torch.device(device), "in_one_call": False}
    model = replace(loaded, shape=shape, **known)
    return plan_engine(config, model, FreeMemory(int(num_bytes), "available memory"), ATTENTION)


def taken(plan: EnginePlan, shape: ModelShape) -> float:
    """What cache and step take by their formulas."""
    page = page_bytes(shape, torch.bfloat16, plan.page_size)
    cache = plan.num_blocks * shape.num_layers * page
    footprint = step_footprint(
        shape,
        torch.bfloat16,
        max_batch_tokens=plan.max_batch_tokens,
        max_requests=plan.max_requests_per_batch,
        max_context=longest_context(shape, torch.bfloat16, cache, plan.max_model_len),
        gathers=ATTENTION.gathers,
        in_one_call=False,
    )
    return cache + footprint.total


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("shape", [SMALL, LARGE, HYBRID], ids=["small", "large", "hybrid"])
@pytest.mark.parametrize("num_bytes", [3 * GIB, 16 * GIB, 500 * GIB])
def test_any_combination_of_given_and_inferred_settings_fits(
    loaded: LoadedModel, names: tuple[str, ...], shape: ModelShape, num_bytes: int
) -> None:
    plan = make_plan(loaded, shape, num_bytes, **{name: GIVEN[name] for name in names})
    for name in names:
        assert plan.settings()[name] == {"value": GIVEN[name], "reason": "given"}
    for name in set(GIVEN) - set(names):
        assert plan.reasons[name] not in ("", "given")
    assert 1 <= plan.max_requests_per_batch <= plan.max_batch_tokens
    assert plan.num_blocks >= 1
    assert taken(plan, shape) <= plan.max_memory_percent * num_bytes


@pytest.mark.parametrize("shape", [SMALL, LARGE, HYBRID], ids=["small", "large", "hybrid"])
def test_more_memory_never_gives_less(loaded: LoadedModel, shape: ModelShape) -> None:
    plans = [make_plan(loaded, shape, 3 * GIB * 1.3**i) for i in range(20)]
    for name in ("max_batch_tokens", "max_requests_per_batch"):
        values = [getattr(plan, name) for plan in plans]
        assert values == sorted(values)
    assert plans[-1].num_blocks > plans[0].num_blocks
    assert plans[-1].max_batch_tokens == 512
    assert plans[-1].max_requests_per_batch == 128


def test_a_small_machine_gets_a_smaller_batch_and_is_told_why(loaded: LoadedModel) -> None:
    plan = make_plan(loaded, HYBRID, 600 * MIB)
    assert plan.max_batch_tokens < 512
    assert plan.max_requests_per_batch < 128
    assert "halved" in plan.reasons["max_batch_tokens"]
    assert "halved" in plan.reasons["max_requests_per_batch"]


def test_requests_are_halved_though_the_tokens_are_given(loaded: LoadedModel) -> None:
    plan = make_plan(loaded, HYBRID, 600 * MIB, max_batch_tokens=512)
    assert (plan.max_batch_tokens, plan.reasons["max_batch_tokens"]) == (512, "given")
    assert plan.max_requests_per_batch < 128


def test_requests_that_are_given_have_a_token_each(loaded: LoadedModel) -> None:
    for num_bytes in (GIB, 100 * GIB):
        plan = make_plan(loaded, SMALL, num_bytes, max_requests_per_batch=600)
        assert plan.max_requests_per_batch == plan.max_batch_tokens == 600
        assert "max_requests_per_batch" in plan.reasons["max_batch_tokens"]
        assert plan.reasons["max_requests_per_batch"] == "given"


def test_a_long_context_does_not_shrink_the_batch(loaded: LoadedModel) -> None:
    """What scoring a long context takes does not grow with the batch."""
    plan = make_plan(loaded, LARGE, 24 * GIB)
    assert (plan.max_batch_tokens, plan.max_requests_per_batch) == (512, 128)


def test_the_cache_is_never_larger_than_the_batch_can_use(loaded: LoadedModel) -> None:
    plan = make_plan(loaded, SMALL, 4000 * GIB, max_requests_per_batch=7, max_model_len=1000)
    assert plan.num_blocks == 7 * ceil_div(1000, plan.page_size)
    assert "max_requests_per_batch" in plan.reasons["num_blocks"]


# What does not fit


def test_too_many_blocks_are_told_how_many_would_fit(loaded: LoadedModel) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(loaded, SMALL, 4 * GIB, num_blocks=10**6)
    assert "num_blocks 1000000 needs 343 GiB" in str(caught.value)
    found = re.search(r"at most (\d+) blocks", caught.value.hint or "")
    assert found is not None
    most = int(found[1])
    assert make_plan(loaded, SMALL, 4 * GIB, num_blocks=most).num_blocks == most
    with pytest.raises(DoesNotFitError, match=f"at most {most} blocks"):
        make_plan(loaded, SMALL, 4 * GIB, num_blocks=most + 1)


ADVICE: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"max_batch_tokens": 8192}, {"max_batch_tokens": 64}),
    ({"max_batch_tokens": 8192, "max_requests_per_batch": 2000}, {"max_batch_tokens": 64}),
    ({"max_requests_per_batch": 500, "max_memory_percent": 0.3}, {"max_requests_per_batch": 8}),
    ({"max_memory_percent": 0.01}, {"max_memory_percent": 0.5}),
    ({"cpu_offload_space": 2.0}, {"cpu_offload_space": 0.1}),
]


@pytest.mark.parametrize(("asked", "followed"), ADVICE)
@pytest.mark.parametrize("num_blocks", [None, 9])
def test_where_nothing_is_left_for_the_cache_each_advice_works(
    loaded: LoadedModel, asked: dict[str, object], followed: dict[str, object], num_blocks: int | None
) -> None:
    shape = replace(LARGE, num_layers=4, sliding_windows=(None,) * 4)
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(loaded, shape, GIB, num_blocks=num_blocks, **asked)
    (advised,) = followed
    assert advised in (caught.value.hint or "")
    assert "1 GiB" in str(caught.value)
    plan = make_plan(loaded, shape, GIB, num_blocks=num_blocks, **(asked | followed))
    assert plan.num_blocks >= (num_blocks or 1)


@pytest.mark.parametrize("space", [0.6, 1.0, 500.0])
def test_host_memory_that_leaves_nothing_is_told_by_its_name(loaded: LoadedModel, space: float) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(loaded, SMALL, GIB, cpu_offload_space=space)
    message = f"cpu_offload_space {space:g} GiB leaves nothing for the KV cache: 614 MiB of 1 GiB (available memory)"
    assert message in str(caught.value)
    assert "-" not in str(caught.value)


# The rest of the memory system's settings


def test_host_memory_is_taken_from_the_cache_where_both_are_the_same(loaded: LoadedModel) -> None:
    without, with_host = (make_plan(loaded, SMALL, 4 * GIB, cpu_offload_space=space) for space in (0.0, 0.5))
    block = SMALL.num_layers * page_bytes(SMALL, torch.bfloat16, 16)
    assert without.num_host_pages == 0
    assert with_host.num_host_pages == GIB // 2 // page_bytes(SMALL, torch.bfloat16, 16)
    assert (without.num_blocks - with_host.num_blocks) * block == pytest.approx(GIB / 2, rel=0.01)
    assert with_host.reasons["cpu_offload_space"] == "given"
    on_gpu = [make_plan(loaded, SMALL, 4 * GIB, device="cuda", cpu_offload_space=space) for space in (0.0, 0.5)]
    assert on_gpu[0].num_blocks == on_gpu[1].num_blocks


def test_a_gpu_has_its_own_defaults(loaded: LoadedModel) -> None:
    plan = make_plan(loaded, SMALL, 80 * GIB, device="cuda")
    assert (plan.max_batch_tokens, plan.max_requests_per_batch, plan.max_memory_percent) == (8192, 1024, 0.9)
    assert make_plan(loaded, SMALL, 80 * GIB).max_memory_percent == 0.6


@pytest.mark.parametrize(
    ("settings", "margin"),
    [
        ({}, 0.15),
        ({"scheduler_type": "fifo"}, 0.15),
        ({"scheduler_type": "prefill_first"}, 0.0),
        ({"safety_margin": 0.0}, 0.0),
        ({"scheduler_type": "prefill_first", "safety_margin": 0.3}, 0.3),
    ],
)
def test_the_margin_is_the_schedulers_unless_given(
    loaded: LoadedModel, settings: dict[str, object], margin: float
) -> None:
    plan = make_plan(loaded, SMALL, 4 * GIB, **settings)
    assert plan.safety_margin == margin
    assert plan.scheduler_type == settings.get("scheduler_type", "fifo")


@pytest.mark.parametrize("asked", [None, True, False])
def test_sharing_is_off_where_a_layer_slides_and_the_plan_says_so(loaded: LoadedModel, asked: bool | None) -> None:
    assert make_plan(loaded, SMALL, 4 * GIB, allow_block_sharing=asked).allow_block_sharing == (asked is not False)
    for windows in (HYBRID.sliding_windows, (512,) * 18):
        plan = make_plan(loaded, replace(HYBRID, sliding_windows=windows), 4 * GIB, allow_block_sharing=asked)
        assert not plan.allow_block_sharing
        assert "sliding" in plan.reasons["allow_block_sharing"]
    # No context outgrows the window.
    assert make_plan(loaded, HYBRID, 4 * GIB, max_model_len=512).allow_block_sharing


def test_every_setting_is_printed_with_its_reason(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = make_plan(loaded, SMALL, 4 * GIB).settings()
    undecided = {"reasons", "mode", "num_host_pages", "layer_windows"}
    names = {field for field in EnginePlan.__slots__ if field not in undecided}
    assert set(settings) == names
    assert all(setting["reason"] for setting in settings.values())


def test_the_default_page_wastes_less_than_four_percent_of_the_cache_on_chat_rows(loaded: LoadedModel) -> None:
    """Prompts of 30 to 400 tokens and completions as long, over whose steps the waste is averaged."""
    rng = random.Random(0)

    def length(mu: float) -> int:
        return min(400, max(30, round(rng.lognormvariate(mu, 0.6))))

    plan = make_plan(loaded, SMALL, 16 * GIB)
    limits = StepLimits(plan.max_batch_tokens, plan.max_requests_per_batch, max_pages_read=10**9)
    scheduler = FifoScheduler(make_cache(plan.num_blocks, plan.page_size), limits)
    for row in range(128):
        scheduler.add(make_request(row, [row] * length(4.7), length(4.6)))
    waste: list[float] = []
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        scheduler.launch(step)
        waste.append(scheduler.cache.waste_fraction(scheduler.num_filled()) or 0.0)
        scheduler.update(step, [[1] for item in step.items if item.num_results], 0.0)
    assert 0.01 < sum(waste) / len(waste) < 0.04


# Steps that run ahead of their results

ON_DEVICE = AttentionChoice("Triton", "a reason", gathers=False)


def plan_on_gpu(loaded: LoadedModel, shape: ModelShape = SMALL, **settings: object) -> EnginePlan:
    model = replace(loaded, shape=shape, dtype=torch.bfloat16, device=torch.device("cuda"))
    config = EngineConfig(model="tiny", **settings)  # type: ignore[arg-type]
    return plan_engine(config, model, FreeMemory(4 * GIB, "free on the GPU"), ON_DEVICE)


def test_steps_run_ahead_by_default_where_they_are_captured_and_drafts_are_off_then(loaded: LoadedModel) -> None:
    plan = plan_on_gpu(loaded)
    assert (plan.use_cuda_graph, plan.use_async_batching, plan.speculation) == (True, True, 0)
    assert "on by default" in plan.reasons["use_async_batching"]
    assert "before the tokens are known" in plan.reasons["speculation"]
    assert plan_on_gpu(loaded, use_async_batching=True).reasons["use_async_batching"] == "given"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_cuda_graph": False}, "off: it needs CUDA graphs"),
        ({"speculation": True}, "off: speculation was asked for"),
        ({"use_async_batching": False}, "given"),
    ],
)
def test_steps_wait_for_results_for_a_reason(loaded: LoadedModel, settings: dict[str, object], reason: str) -> None:
    plan = plan_on_gpu(loaded, **settings)
    assert not plan.use_async_batching
    assert plan.reasons["use_async_batching"] == reason
    assert plan.speculation > 0


def test_on_a_cpu_steps_wait_for_results_and_asking_otherwise_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = make_plan(loaded, SMALL, 4 * GIB)
    assert not plan.use_async_batching
    assert plan.reasons["use_async_batching"] == "off: it needs CUDA graphs"
    config = EngineConfig(model=str(build_tiny("llama", tmp_path)), device="cpu")
    shape = inspect_model(config)
    with pytest.raises(UsageError, match="use_async_batching needs CUDA graphs, and so a CUDA device"):
        check_config(replace(config, use_async_batching=True), shape)
    with pytest.raises(UsageError, match="use_async_batching"):
        check_config(replace(config, device="auto", use_async_batching=True, use_cuda_graph=False), shape)


def test_two_sets_of_buffers_leave_less_for_the_cache(loaded: LoadedModel) -> None:
    one, two = (plan_on_gpu(loaded, use_async_batching=on) for on in (False, True))
    assert two.num_blocks < one.num_blocks
    limits = {"max_batch_tokens": 1024, "max_requests": 64, "max_context": 512, "gathers": False, "in_one_call": False}
    single, double = (step_footprint(SMALL, torch.bfloat16, **limits, num_buffers=n) for n in (1, 2))  # type: ignore[arg-type]
    assert double.index_tensors == 2 * single.index_tensors
    assert double.logits - single.logits == 64 * SMALL.vocab_size * 2
