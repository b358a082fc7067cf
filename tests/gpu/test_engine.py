"""The engine on a device: in float32 the tokens of `generate()`, and a long run with little memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cbatch_kernels import shared_prefix

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.rehearsal import CudaMemory, measure_steps
from cbatch.engine.request import Prompt
from cbatch.models.attention_library import open_library
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.engine.reference import count_near_ties, generate_references
from tests.engine.tiny_engine import make_tokens, run
from tests.tiny_models import FAMILIES, build_tiny

SETTINGS: list[dict[str, object]] = [
    {"num_blocks": 400},
    {"num_blocks": 400, "page_size": 4, "max_batch_tokens": 17},
    {"num_blocks": 40, "max_batch_tokens": 64, "safety_margin": 0.0},
    {"num_blocks": 40, "max_batch_tokens": 64, "safety_margin": 0.0, "cpu_offload_space": 0.01},
    {"num_blocks": 400, "scheduler_type": "prefill_first", "allow_block_sharing": False},
]


def load_on_device(folder: Path) -> LoadedModel:
    config = EngineConfig(model=str(folder), dtype="float32", device="cuda")
    return load_model(config, inspect_model(config))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_equal_those_of_generate(family: str, tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path)
    loaded = load_on_device(folder)
    prompts = [make_tokens(n, seed=n) for n in (1, 5, 17, 64, 65, 130)]
    prompts += [prompts[-1][:80] + make_tokens(9, seed=s) for s in (1, 2, 3)]
    max_tokens = [12, 9, 20, 6, 16, 10, 12, 30, 5]
    references = generate_references(folder, prompts, max_tokens)
    for settings in SETTINGS:
        engine = Engine.over(loaded, EngineConfig(model=str(folder), **settings))  # type: ignore[arg-type]
        assert engine.plan.attention == "Triton"
        rows = [
            Prompt(i, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        outputs = run(engine, *rows)
        assert count_near_ties(references, [output.token_ids for output in outputs]) <= 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral_window"])
def test_graphs_and_asynchronous_batching_change_nothing(family: str, tmp_path: Path) -> None:
    """Drawn rows, stops, penalties and scores: on and off, the same tokens, reasons and log-probabilities."""
    folder = build_tiny(family, tmp_path)
    loaded = load_on_device(folder)
    asked = [
        SamplingParams(max_tokens=40, temperature=1.5, seed=1, n=3),
        SamplingParams(max_tokens=40, temperature=2.0, seed=2, stop=("e", "a", "1"), min_tokens=3),
        SamplingParams(max_tokens=30, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1, temperature=1.0, seed=3),
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=1),
    ]
    rows = [Prompt(i, make_tokens(1 + 7 * i, seed=i), asked[i % len(asked)]) for i in range(24)]
    ways: list[dict[str, object]] = [{"use_cuda_graph": False}, {"use_async_batching": False}, {}]
    for settings in SETTINGS:
        told = []
        for way in ways:
            config = EngineConfig(model=str(folder), **(settings | way))  # type: ignore[arg-type]
            engine = Engine.over(loaded, config)
            assert engine.plan.use_cuda_graph == ("use_cuda_graph" not in way)
            assert engine.plan.use_async_batching == (not way)
            outputs = run(engine, *rows)
            assert engine._cache.usage == 0
            told.append(
                [(o.token_ids, o.finish_reason, o.stop_reason, [s.token_ids for s in o.samples]) for o in outputs]
            )
        assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("way", [{}, {"use_cuda_graph": False}, {"use_async_batching": False}], ids=str)
def test_rows_that_begin_alike_attend_together_and_get_the_tokens_of_generate(
    way: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 100)
    folder = build_tiny("llama", tmp_path)
    common = make_tokens(80)
    prompts = [[*common, *make_tokens(1 + n % 7, seed=n)] for n in range(12)]
    max_tokens = [8 + 3 * (n % 5) for n in range(12)]
    references = generate_references(folder, prompts, max_tokens)
    engine = Engine.over(load_on_device(folder), EngineConfig(model=str(folder), page_size=8, num_blocks=400, **way))  # type: ignore[arg-type]
    rows = (
        Prompt(i, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=True))
    )
    outputs = run(engine, *rows)
    assert count_near_ties(references, [output.token_ids for output in outputs]) <= 1


def test_memory_is_shared_out_by_steps_that_are_measured(tmp_path: Path) -> None:
    """A cache as large as may be, and a job that fills batch and cache: memory never runs out."""
    loaded = load_on_device(build_tiny("llama", tmp_path))
    found = measure_steps(loaded, CudaMemory(loaded.device), loaded.shape.context_length, 16, 8192, 256)
    assert found is not None
    assert found.largest > found.decoding > 256 * loaded.shape.vocab_size * 4
    engine = Engine.over(loaded, EngineConfig(model="tiny"))
    rows = (Prompt(i, make_tokens(100, seed=i), SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(2000))
    assert len(run(engine, *rows)) == 2000
    assert engine.stats.out_of_memory_steps == 0


@pytest.mark.parametrize(("name", "page_size"), [("flash_attn", 256), ("flashinfer", 16)])
def test_a_library_that_is_installed_gives_what_ours_gives(name: str, page_size: int, tmp_path: Path) -> None:
    pytest.importorskip(name)
    folder = build_tiny("llama", tmp_path, head_dim=64)
    config = EngineConfig(model=str(folder), dtype="bfloat16", device="cuda", attention=name, page_size=page_size)  # type: ignore[arg-type]
    loaded = load_model(config, inspect_model(config))
    assert open_library(config, loaded, page_size) is not None
    engine = Engine.over(loaded, config)
    assert engine.plan.use_cuda_graph == (name == "flash_attn")
    rows = (
        Prompt(i, make_tokens(n, seed=n), SamplingParams(max_tokens=20, ignore_eos=True))
        for i, n in enumerate((1, 9, 70))
    )
    assert [len(output.token_ids) for output in run(engine, *rows)] == [20, 20, 20]


def test_ten_thousand_requests_with_little_memory(tmp_path: Path) -> None:
    loaded = load_on_device(build_tiny("llama", tmp_path))
    rng = random.Random(0)
    lengths = [rng.randrange(1, 40) for _ in range(10_000)]
    rows = (
        Prompt(i, make_tokens(rng.randrange(1, 120), seed=i % 500), SamplingParams(max_tokens=length, ignore_eos=True))
        for i, length in enumerate(lengths)
    )
    engine = Engine.over(loaded, EngineConfig(model="tiny", num_blocks=60, safety_margin=0.0, cpu_offload_space=0.01))
    counts = {output.request_id: len(output.token_ids) for output in engine.generate(rows)}
    assert counts == dict(enumerate(lengths))
    assert engine.stats.offloads > 0
