"""SmolLM2 itself on prompts of the sample jobs: the tokens of `generate()`, in float32, under tight settings."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt
from cbatch.jobs.prompts import PromptEncoder
from cbatch.jobs.rendering import Renderer
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.conftest import ROOT
from tests.engine.reference import Reference, count_near_ties, generate_references

MAX_TOKENS = 12
ROWS = 2  # of each job
CLOCK = datetime(2030, 1, 2)


@dataclass(frozen=True)
class RealModel:
    loaded: LoadedModel
    prompts: list[list[int]]
    references: list[Reference]


@pytest.fixture(scope="module")
def smollm2(real_model: Path) -> RealModel:
    config = EngineConfig(model=str(real_model), dtype="float32")
    loaded = load_model(config, inspect_model(config))
    prompts = []
    for folder in sorted(path.parent for path in (ROOT / "sample_jobs").glob("*/job.toml")):
        job = tomllib.loads((folder / "job.toml").read_text(encoding="utf-8"))
        renderer = Renderer(template=job["template"], system_prompt=job.get("system_prompt"))
        encoder = PromptEncoder(loaded.tokenizer, loaded.shape.context_length, "error", CLOCK)
        lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        prompts += [encoder.encode(renderer.render(json.loads(line)), MAX_TOKENS).token_ids for line in lines[:ROWS]]
    return RealModel(loaded, prompts, generate_references(real_model, prompts, [MAX_TOKENS] * len(prompts)))


@pytest.mark.real_model
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 64, "max_batch_tokens": 96, "allow_block_sharing": False},
        {"page_size": 4, "max_batch_tokens": 256, "max_requests_per_batch": 3, "num_blocks": 450},
    ],
    ids=["default", "no sharing", "tight"],
)
def test_tokens_equal_those_of_generate(smollm2: RealModel, settings: dict[str, int | bool]) -> None:
    config = EngineConfig(model="SmolLM2", **({"num_blocks": 1024} | settings))  # type: ignore[arg-type]
    engine = Engine.over(smollm2.loaded, config)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = engine.generate(Prompt(i, tokens, params) for i, tokens in enumerate(smollm2.prompts))
    generated = {output.request_id: output.token_ids for output in outputs}
    ties = count_near_ties(smollm2.references, [generated[i] for i in range(len(smollm2.prompts))])
    assert ties <= 1
    assert (engine.stats.cached_tokens > 0) == (settings.get("allow_block_sharing") is not False)
