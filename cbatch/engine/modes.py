"""How requests are batched, from one at a time to the engine's own way: for comparison, on the same engine.

    naive                one request at a time
    static               a batch waits for its slowest: nobody joins until all of it has ended
    continuous           requests join and leave at every step, and a prompt is computed whole, in one step
    continuous+chunked   the engine's own: prompts are split where a step's budget ends

`bench` and `simulate` run all four. Everything else is the same in all of them: kernels, cache, prefix sharing,
preemption. Leaves out prompts whose tokens are scored, which the limit on logits splits in every mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.policies import SCHEDULERS, FifoScheduler
from cbatch.engine.request import Request
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.step import StepLimits, StepPlan
from cbatch.errors import UsageError


class WholePromptScheduler(FifoScheduler):
    """Never splits a prompt: the token budget bounds how many prompts a step takes, which is one at least."""

    def may_join(self, plan: StepPlan) -> bool:
        return len(plan.items) == self.num_candidates  # else somebody who came before found no place

    @property
    def num_candidates(self) -> int:
        """Count the active requests that want a place in the step."""
        if not self.num_in_flight:
            return len(self.active)
        return sum(not request.awaits_results for request in self.active)

    def has_token_budget(self, plan: StepPlan) -> bool:
        return super().has_token_budget(plan) or not _has_prompt(plan)

    def num_tokens_within_budget(self, num_uncomputed: int, plan: StepPlan) -> int:
        fits = plan.num_tokens + num_uncomputed <= self.limits.max_batch_tokens
        return num_uncomputed if fits or not _has_prompt(plan) else 0


class StaticScheduler(WholePromptScheduler):
    """Forms a batch, over the steps that its prompts take, then runs it until the last one of it has ended."""

    _is_forming = True
    _num_waiting_for_batch = 0  # whose prompts are done while the batch still forms

    def schedule(self, now: float) -> StepPlan:
        self._is_forming = self._is_forming or not self.active
        plan = super().schedule(now)
        if plan.items or not self.active or self.num_in_flight:
            return plan
        self._is_forming = False  # nobody else could join
        return super().schedule(now)

    def order_active(self) -> Iterable[Request]:
        decodes, prefills = self._split_active()
        self._num_waiting_for_batch = len(decodes) if self._is_forming else 0
        return prefills if self._is_forming else [*decodes, *prefills]

    def may_join(self, plan: StepPlan) -> bool:
        return self._is_forming and super().may_join(plan)

    @property
    def num_candidates(self) -> int:
        return super().num_candidates - self._num_waiting_for_batch


def _has_prompt(plan: StepPlan) -> bool:
    """Tell whether an item of the plan has more than a token."""
    return plan.num_tokens > len(plan.items)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to batch. `scheduler` takes the place of the configured one; None leaves that."""

    name: str
    scheduler: type[Scheduler] | None = None
    max_requests_per_batch: int | None = None  # the plan's, where None

    def make_scheduler(
        self, policy: str, cache: CacheManager, limits: StepLimits, *, safety_margin: float, num_host_pages: int
    ) -> Scheduler:
        """Build the scheduler; `policy` is the configured one."""
        if self.max_requests_per_batch is not None:
            limits = replace(limits, max_requests_per_batch=self.max_requests_per_batch)
        scheduler = self.scheduler or SCHEDULERS[policy]
        return scheduler(cache, limits, safety_margin=safety_margin, num_host_pages=num_host_pages)

    def largest_step(self, max_batch_tokens: int, max_model_len: int) -> int:
        """Count the tokens of one request that a step can hold at most."""
        return max_batch_tokens if self.scheduler is None else max(max_batch_tokens, max_model_len)


NAIVE, STATIC, CONTINUOUS, CHUNKED = "naive", "static", "continuous", "continuous+chunked"
MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(NAIVE, WholePromptScheduler, max_requests_per_batch=1),
        Mode(STATIC, StaticScheduler),
        Mode(CONTINUOUS, WholePromptScheduler),
        Mode(CHUNKED),
    )
}


def parse_modes(text: str) -> list[str]:
    """Read names of modes, separated by commas; each once. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MODES:
            raise UsageError(f"--modes names '{name}', which is none", hint=f"known: {', '.join(MODES)}")
    return list(dict.fromkeys(names))
