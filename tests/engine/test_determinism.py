"""deterministic: the same tokens and the same log-probabilities, to the bit, whatever the schedule."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.compile import CompiledKernels
from cbatch_kernels.dispatch import choose_attention

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine import determinism
from cbatch.engine.engine import Engine
from cbatch.engine.plan import check_config
from cbatch.engine.request import Prompt
from cbatch.errors import UsageError
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.tiny_models import build_tiny

SETTINGS: dict[str, dict[str, object]] = {
    "small chunks": {"max_batch_tokens": 7},
    "chunks": {"max_batch_tokens": 33},
    "alone and backwards": {"max_requests_per_batch": 1},
    "soft resets": {"num_blocks": 56},
    "offloads": {"num_blocks": 56, "cpu_offload_space": 0.01},
}


@pytest.fixture
def only_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(dispatch, "load_kernels", lambda _: CompiledKernels(None, "a test wants none"))


CALLED_ONE_BY_ONE = [("granite", "float32"), ("gemma3", "float32"), ("gpt2", "bfloat16")]  # layer by layer
KINDS = [("llama", "float32"), *CALLED_ONE_BY_ONE]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    family, dtype = request.param
    config = EngineConfig(model=str(build_tiny(family, tmp_path_factory.mktemp(family))), dtype=dtype)
    return load_model(config, inspect_model(config))


def make_prompts() -> list[Prompt]:
    rng = random.Random(5)
    header = [rng.randrange(5, 250) for _ in range(70)]
    prompts = []
    for i, length in enumerate([1, 3, 17, 64, 65, 30, 120, 300, 5, 9]):
        tokens = (header if i % 3 == 0 else []) + [rng.randrange(5, 250) for _ in range(length)]
        params = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True, temperature=i % 2 * 1.0, seed=i)
        prompts.append(Prompt(i, tokens, params))
    return prompts


def run(loaded: LoadedModel, prompts: list[Prompt], **settings: object) -> tuple[list[object], Engine]:
    config = EngineConfig(model="tiny", **({"num_blocks": 512, "page_size": 8, "deterministic": True} | settings))  # type: ignore[arg-type]
    engine = Engine.over(loaded, config)
    outputs = sorted(engine.generate(prompts), key=lambda output: output.request_id)
    assert all(output.error is None for output in outputs)
    return [(output.token_ids, output.logprobs and output.logprobs.tokens) for output in outputs], engine


@pytest.mark.parametrize(("most_bytes", "most_rows"), [(64 << 20, 200), (100 * 20 * 4, 17), (0, 2)])
def test_products_are_compared_up_to_what_small_memory_holds(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, most_rows: int
) -> None:
    counts = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return x.sum(dim=1, keepdim=True).expand(-1, 100)

    monkeypatch.setattr(determinism, "MAX_CHECKED_BYTES", most_bytes)
    assert determinism._holds(determinism._Product(multiply, 100, 8, torch.float32), 1)
    assert max(counts) == most_rows
    assert len(set(counts)) >= 2, "or nothing is compared"


def test_tokens_and_scores_are_the_same_to_the_bit(loaded: LoadedModel) -> None:
    prompts = make_prompts()
    expected, _ = run(loaded, prompts)
    for name, settings in SETTINGS.items():
        given = prompts[::-1] if "backwards" in name else prompts
        results, engine = run(loaded, given, **settings)
        assert results == expected, name
        assert (engine.stats.preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.usefixtures("only_references")
@pytest.mark.parametrize("loaded", CALLED_ONE_BY_ONE, indirect=True, ids=str)
def test_so_they_are_without_compiled_kernels(loaded: LoadedModel) -> None:
    prompts = make_prompts()[:8]
    expected, _ = run(loaded, prompts)
    results, _ = run(loaded, prompts, **SETTINGS["chunks"])
    assert results == expected


@pytest.mark.usefixtures("only_references")
@pytest.mark.parametrize("loaded", CALLED_ONE_BY_ONE, indirect=True, ids=str)
def test_without_it_the_bits_do_depend(loaded: LoadedModel) -> None:
    """What the test above compares differs where nothing is done for it; the compiled kernels always do it."""
    prompts = make_prompts()
    plain, _ = run(loaded, prompts, deterministic=False)
    cut, _ = run(loaded, prompts, deterministic=False, max_batch_tokens=7)
    assert plain != cut or str(loaded.dtype) == "torch.bfloat16"


def test_what_cannot_hold_it_is_refused_before_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = EngineConfig(model=str(build_tiny("mixtral", tmp_path / "experts")), deterministic=True)
    with pytest.raises(UsageError, match="mixture of experts"):
        check_config(experts, inspect_model(experts))
    plain = EngineConfig(model=str(build_tiny("llama", tmp_path / "plain")), device="cuda", deterministic=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="CPU only"):
        check_config(plain, inspect_model(plain))


def test_a_machine_whose_products_depend_on_the_batch_is_found_out(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(determinism, "_holds", lambda *_: False)
    with pytest.raises(UsageError, match="depend on the number of rows"):
        run(loaded, [])


def test_it_is_a_setting_with_a_reason(loaded: LoadedModel) -> None:
    _, engine = run(loaded, [])
    settings = engine.plan.settings()
    assert settings["deterministic"] == {"value": True, "reason": "given"}
    choice = choose_attention(loaded.device, loaded.dtype, loaded.shape.head_dim, fixed_order=True)
    assert settings["attention"] == {"value": choice.name, "reason": choice.reason}


def test_it_is_on_by_default_exactly_where_nothing_is_lost_by_it(loaded: LoadedModel) -> None:
    prompts = make_prompts()
    results, engine = run(loaded, prompts, deterministic=None)
    setting = engine.plan.settings()["deterministic"]
    attention = choose_attention(loaded.device, loaded.dtype, loaded.shape.head_dim)
    is_free = not attention.gathers and determinism.row_multiple(loaded) == 1
    assert setting["value"] == is_free
    assert ("at no cost" in str(setting["reason"])) == is_free
    if is_free:
        cut, _ = run(loaded, prompts, deterministic=None, max_batch_tokens=7)
        assert cut == results


@pytest.mark.usefixtures("only_references")
@pytest.mark.parametrize("loaded", CALLED_ONE_BY_ONE, indirect=True, ids=str)
def test_it_is_off_by_default_where_it_would_cost_speed(loaded: LoadedModel) -> None:
    _, engine = run(loaded, [], deterministic=None)
    assert engine.plan.settings()["deterministic"] == {"value": False, "reason": "off by default where it costs speed"}


def test_it_can_be_left_out_where_it_is_free(loaded: LoadedModel) -> None:
    _, engine = run(loaded, [], deterministic=False)
    assert engine.plan.settings()["deterministic"] == {"value": False, "reason": "given"}
