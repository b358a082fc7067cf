"""A run without a model: the real engine over the real cache, every token made up. Called by `job_plan`.

Which request computes which tokens does not depend on what the tokens are, as long as none ends a completion early. So
the counts are those of a run in which every completion is as long as it may be. Leaves out how long steps take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.cache.build import build_cache
from cbatch.engine.engine import Engine
from cbatch.engine.logprobs import part_of_prompt
from cbatch.engine.plan import EnginePlan
from cbatch.engine.request import Prompt
from cbatch.engine.step import ComputedStep, ScheduledRequest, StepPlan
from cbatch.models.outline import ModelOutline
from cbatch.simulate.cost import CostModel


@dataclass(slots=True)
class DryRunner:
    """Computes nothing: a request's tokens are its own, which no prompt has."""

    cost: CostModel | None = None
    tokens_per_page: float = 0.0  # of a page of one layer, in tokens of the whole model
    seconds: float = 0.0  # that the steps would have taken, where their cost is known

    def launch(self, plan: StepPlan) -> ComputedStep:
        """Give every request that samples its token."""
        for item in plan.items:
            if item.request.scores_prompt:
                _score(item)
        if self.cost is not None:
            self.seconds += self.cost.step_s(
                plan.num_tokens, plan.num_pages_read * self.tokens_per_page, len(plan.items), plan.num_pairs
            )
        return ComputedStep([[_own_token(item)] for item in plan.items if item.num_results])

    def settle(self) -> None:
        """Do nothing: every step is over as soon as it is launched."""


def _own_token(item: ScheduledRequest) -> int:
    request = item.request
    return -1 - request.request_id * request.prompt.sampling.n - request.sample


def _score(item: ScheduledRequest) -> None:
    """Mark a prompt's tokens as scored, as the step would."""
    request, start = item.request, item.num_computed_before
    part = part_of_prompt(request, start, start + item.num_tokens)
    for _ in range(part.count if part is not None else 0):
        assert request.logprobs is not None
        request.logprobs.add_prompt(0.0, [])


class DryRun:
    """An engine that was never loaded; what it counts is in `engine.stats`."""

    def __init__(
        self, config: EngineConfig, plan: EnginePlan, outline: ModelOutline, cost: CostModel | None = None
    ) -> None:
        plan = replace(plan, speculation=0)  # drafts follow the tokens, which are not known
        cache = build_cache(
            plan.layer_windows,
            num_blocks=plan.num_blocks,
            page_size=plan.page_size,
            max_batch_tokens=plan.max_batch_tokens,
            max_model_len=plan.max_model_len,
            allow_block_sharing=plan.allow_block_sharing,
        )
        self.runner = DryRunner(cost, cache.tokens_in_pages(1))
        self.engine = Engine(config, plan, outline, cache, self.runner)


def without_endings(prompt: Prompt) -> Prompt:
    """Give a prompt whose completions are as long as they may be, and that needs no model to be chosen."""
    asked = prompt.sampling
    kept = SamplingParams(
        max_tokens=asked.max_tokens, n=asked.n, prompt_logprobs=asked.prompt_logprobs, ignore_eos=True
    )
    return replace(prompt, sampling=kept)
