"""The largest batch that a step may have, and what a cache and the steps over it take. Decided by plan.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import torch

from cbatch.engine.cache.build import group_layers
from cbatch.engine.execution import Execution
from cbatch.engine.rehearsal import Measure, MeasuredSteps
from cbatch.engine.sizing import (
    StepFootprint,
    block_bytes,
    cache_bytes,
    captured_logits_bytes,
    longest_context,
    step_footprint,
)
from cbatch.models.inspect import ModelShape

Q_PADDING = 16  # query tokens: a captured step is rounded up by few, and a job captures few


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """Its limits, and what it reads and writes."""

    shape: ModelShape
    dtype: torch.dtype
    max_batch_tokens: int
    max_requests: int
    max_model_len: int
    page_size: int
    steps: Execution
    measured: MeasuredSteps | None = None  # None: what steps take is worked out
    row_interval: int = Q_PADDING  # of captured steps

    def step(self, num_blocks: int = 0) -> StepFootprint:
        """Give what a step takes, the longest of its contexts being all that so many blocks hold."""
        cache = num_blocks * block_bytes(self.shape, self.dtype, self.page_size)
        return step_footprint(
            self.shape,
            self.dtype,
            max_batch_tokens=self.max_batch_tokens,
            max_requests=self.max_requests,
            max_context=longest_context(self.shape, self.dtype, cache, self.max_model_len),
            gathers=self.steps.gathers,
            in_one_call=self.steps.in_one_call,
            num_buffers=2 if self.steps.run_ahead else 1,
        )

    def measure(self, measure: Measure | None, row_interval: int) -> LargestBatch:
        """Measure its steps where there is a way to."""
        if measure is None:
            return self
        measured = measure(self.max_batch_tokens, self.max_requests)
        return replace(self, measured=measured, row_interval=row_interval)

    def total(self, num_blocks: int) -> int:
        """Count the bytes of a cache of so many blocks and of a step over it."""
        groups = group_layers(self.shape.sliding_windows, self.max_model_len)
        pages_per_chunk = lcm(*map(len, groups.values()))
        cache = cache_bytes(self.shape, self.dtype, self.page_size, num_blocks, pages_per_chunk)
        return cache + self.beside_cache(num_blocks)

    def beside_cache(self, num_blocks: int) -> int:
        """Count the bytes of a step over a cache of so many blocks."""
        if self.measured is None:
            return self.step(num_blocks).total
        captured = 0
        if self.steps.captured:
            num_sets = 2 if self.steps.run_ahead else 1
            captured = self.measured.decoding + num_sets * captured_logits_bytes(
                self.shape, self.dtype, max_requests=self.max_requests, interval=self.row_interval
            )
        return self.measured.largest + captured
