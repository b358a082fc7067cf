"""The counters of an engine since it was loaded. Written by the engine's step loop only; progress and report read."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.engine.series import StepSeries


@dataclass(slots=True)
class EngineStats:
    """Totals over all steps, and the state after the last one."""

    steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0  # share of the cache that requests own, 0 to 1
    generate_s: float = 0.0  # first step's start → last step's end
    schedule_s: float = 0.0  # spent in schedule and update
    prompt_tokens: int = 0  # of the requests that were scheduled
    cached_tokens: int = 0  # prompt tokens reused, not computed
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a soft reset
    output_tokens: int = 0
    drafted_tokens: int = 0  # guessed, and computed to be checked
    accepted_tokens: int = 0  # of these, the ones that were right: tokens of the output that took no step of their own
    preemptions: int = 0
    offloads: int = 0  # requests moved to the host
    restores: int = 0  # and back
    soft_resets: int = 0
    out_of_memory_steps: int = 0  # forward passes that failed for want of memory and were tried again, smaller
    usage_sum: float = 0.0  # of the share of the cache that requests own while a step runs
    max_cache_usage: float = 0.0  # the most that it was
    waste_sum: float = 0.0  # of the per-step waste fractions
    waste_steps: int = 0
    starved_steps: int = 0  # that had room for more requests and prompts to come, none of them ready
    idle_s: float = 0.0  # spent waiting for prompts with nothing else to do
    series: StepSeries = field(default_factory=StepSeries)

    @property
    def mean_cache_usage(self) -> float:
        """Share of the cache that requests owned, averaged over steps."""
        return self.usage_sum / self.steps if self.steps else 0.0

    @property
    def kv_waste_fraction(self) -> float:
        """Share of the allocated slots that held no token, averaged over steps."""
        return self.waste_sum / self.waste_steps if self.waste_steps else 0.0
