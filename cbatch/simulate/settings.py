"""The engine that is simulated: what of a real engine's plan decides over its schedule. Built from options, from a
run's trace or from a preset; read by the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cbatch.engine.cache.build import build_cache
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.modes import Mode
from cbatch.engine.policies import SCHEDULERS
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.step import StepLimits
from cbatch.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """Settings under the names that the engine's own have."""

    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    max_model_len: int
    scheduler_type: str = "fifo"
    safety_margin: float | None = None  # None: the scheduler's default
    allow_block_sharing: bool = True
    num_host_pages: int = 0
    layer_windows: tuple[int | None, ...] = (None,)  # one layer stands for all of a model without windows

    def changed(self, values: Mapping[str, Any]) -> SimulatedEngine:
        """Give the engine with those of `values` that it has, None aside. Raises UsageError where it cannot be."""
        known = {field.name for field in fields(self)}
        engine = replace(self, **{k: v for k, v in values.items() if k in known and v is not None})
        if engine.scheduler_type not in SCHEDULERS:
            known_types = ", ".join(SCHEDULERS)
            raise UsageError(f"unknown scheduler_type '{engine.scheduler_type}'", hint=f"known: {known_types}")
        return engine

    def build(self, mode: Mode) -> tuple[CacheManager, Scheduler]:
        """Build the real cache and the real scheduler of a mode, as `Engine` does."""
        cache = build_cache(
            self.layer_windows,
            num_blocks=self.num_blocks,
            page_size=self.page_size,
            max_batch_tokens=mode.largest_step(self.max_batch_tokens, self.max_model_len),
            max_model_len=self.max_model_len,
            allow_block_sharing=self.allow_block_sharing,
        )
        limits = StepLimits(
            self.max_batch_tokens,
            self.max_requests_per_batch,
            max_pages_read=cache.pool.num_usable * cache.pool.pages_per_chunk,
        )
        margin = SCHEDULERS[self.scheduler_type].default_safety_margin
        scheduler = mode.make_scheduler(
            self.scheduler_type,
            cache,
            limits,
            safety_margin=margin if self.safety_margin is None else self.safety_margin,
            num_host_pages=self.num_host_pages,
        )
        return cache, scheduler
