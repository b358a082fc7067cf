"""The real engine over no model at all: its scheduler, cache, intake and step loop, and a runner of the test's.

For tests in which steps matter and tokens do not: equality with the simulator, runs with a planted cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from cbatch.config import EngineConfig
from cbatch.engine.cache.build import build_cache
from cbatch.engine.engine import Engine, Runner
from cbatch.engine.modes import MODES
from cbatch.engine.plan import EnginePlan
from cbatch.engine.policies import SCHEDULERS
from cbatch.engine.step import ComputedStep, StepPlan
from tests.stub_engine import StubTokenizer

TOKEN = 0  # what every step gives every request


class AlwaysTheSame:
    """A runner that computes nothing."""

    def launch(self, plan: StepPlan) -> ComputedStep:
        return ComputedStep([[TOKEN] for item in plan.items if item.num_results])

    def settle(self) -> None:
        pass


class UnloadedTokenizer(StubTokenizer):
    """The stub's, with what an engine asks of one beyond encoding and decoding."""

    as_json = "{}"
    num_tokens = StubTokenizer.vocab_size

    def special_token_id(self, _text: str) -> int | None:
        return None


def make_plan(**settings: Any) -> EnginePlan:
    """A plan whose values are those given, each decided by nobody."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "mode": "continuous+chunked",
        "max_model_len": 4096,
        "layer_windows": (None,),
        "page_size": 16,
        "num_blocks": 512,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 8,
        "max_memory_percent": 0.6,
        "scheduler_type": "fifo",
        "allow_block_sharing": True,
        "cpu_offload_space": 0.0,
        "num_host_pages": 0,
        "speculation": 0,
        "deterministic": False,
        "attention": "none",
    } | settings
    values.setdefault("safety_margin", SCHEDULERS[values["scheduler_type"]].default_safety_margin)
    names = {field.name for field in fields(EnginePlan)} - {"reasons"}
    values |= dict.fromkeys(names - values.keys(), False)
    return EnginePlan(**values, reasons=dict.fromkeys(names - {"layer_windows", "mode"}, "as the test wants it"))


def make_unloaded(runner: Runner | None = None, *, mode: str = "continuous+chunked", **settings: Any) -> Engine:
    """An engine with these settings of its plan."""
    plan = make_plan(mode=mode, **settings)
    cache = build_cache(
        plan.layer_windows,
        num_blocks=plan.num_blocks,
        page_size=plan.page_size,
        max_batch_tokens=MODES[mode].largest_step(plan.max_batch_tokens, plan.max_model_len),
        max_model_len=plan.max_model_len,
        allow_block_sharing=plan.allow_block_sharing,
    )
    loaded: Any = SimpleNamespace(
        tokenizer=UnloadedTokenizer(), generation_defaults={}, num_choosable=8, eos_token_ids=frozenset({9})
    )
    return Engine(EngineConfig(model="none"), plan, loaded, cache, runner or AlwaysTheSame(), MODES[mode])


def token_ids(number: int, count: int, shared: Sequence[int] = ()) -> list[int]:
    """Prompt tokens that no other number has, behind those that are shared."""
    return [*shared[:count], *([100 + number] * (count - len(shared[:count])))]
