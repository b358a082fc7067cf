"""Engines over tiny models, as most tests of the engine want them."""

from __future__ import annotations

import random
from pathlib import Path

from cbatch.config import EngineConfig
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model


def load_tiny(folder: Path) -> LoadedModel:
    """Load in float32, once for many engines."""
    config = EngineConfig(model=str(folder), dtype="float32")
    return load_model(config, inspect_model(config))


def make_engine(loaded: LoadedModel, **settings: object) -> Engine:
    """An engine with a cache that is ample unless the settings say otherwise."""
    return Engine.over(loaded, EngineConfig(model="tiny", **({"num_blocks": 128} | settings)))  # type: ignore[arg-type]


def make_tokens(count: int, seed: int = 0) -> list[int]:
    """Ordinary tokens: neither special ones nor those beyond the tokenizer."""
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(count)]


def run(engine: Engine, *prompts: Prompt) -> list[RequestOutput]:
    """Complete prompts; the results in the order of their ids."""
    return sorted(engine.generate(prompts), key=lambda output: output.request_id)
