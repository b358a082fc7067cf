"""Runs prompts through engines and times it: once to learn how long the answers are, then once for every trial.

A trial builds an engine of its own, so that no cache is warm from the one before, warms it up with prompts that are in
no sample, and only then starts the clock. Whatever fails in it is its outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from cbatch.config import SamplingParams
from cbatch.engine.grammar import is_structured
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.stats import EngineStats
from cbatch.errors import CbatchError, EngineError
from cbatch.jobs.prompts import Tokenizer
from cbatch.tune.space import TrialPlan, Value
from cbatch.tune.trial import Outcome

WARM_UP_PROMPTS = 4
WARM_UP_PROMPT_TOKENS = 256
WARM_UP_TOKENS = 4


class TrialEngine(Protocol):
    """What a trial needs of an engine."""

    @property
    def stats(self) -> EngineStats: ...

    def prepare(self, params: SamplingParams) -> None:
        """Make ready what prompts with such parameters need beside the model."""

    def steps(self, prompts: Iterator[Prompt | None]) -> Iterator[list[RequestOutput]]:
        """Give one list of finished requests per step."""


class EngineSource(Protocol):
    """A model in memory, and engines over it."""

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation_defaults(self) -> dict[str, object]: ...

    def plan(self, settings: Mapping[str, Value]) -> TrialPlan:
        """Decide the plan with these settings. Raises UsageError."""

    def build(self, settings: Mapping[str, Value]) -> TrialEngine:
        """Build an engine with these settings."""

    def release(self) -> None:
        """Give back the memory of engines that were let go of."""

    def used_bytes(self) -> int:
        """Count the memory in use."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an engine failed for want of memory."""


def run_trial(engines: EngineSource, settings: Mapping[str, Value], prompts: Sequence[Prompt]) -> Outcome:
    """Measure settings over prompts whose lengths are fixed. The engine is gone when this returns."""
    began = engines.clock()
    try:
        outcome = _run(engines, settings, prompts)
    except Exception as error:
        outcome = Outcome(status="failed", reason=_describe(engines, error))
    return replace(outcome, wall_s=engines.clock() - began)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came of some prompts, run as the job would run them."""

    outputs: dict[int, RequestOutput]  # of those that were finished, by their ids
    seconds: float
    tokens_left: int  # generated for the others, whose time was over


def build_default(engines: EngineSource) -> TrialEngine:
    """Build an engine with the default settings. Raises CbatchError where they do not work."""
    with _of_default(engines):
        return engines.build({})


def run_chunk(engines: EngineSource, engine: TrialEngine, prompts: Sequence[Prompt], limit_s: float) -> Chunk:
    """Run prompts on the default engine, as far as they come in `limit_s` seconds. Raises CbatchError."""
    outputs: dict[int, RequestOutput] = {}
    num_before, began = engine.stats.output_tokens, engines.clock()
    with _of_default(engines):
        for finished in engine.steps(iter(prompts)):
            outputs |= {output.request_id: output for output in finished}
            if engines.clock() - began > limit_s:
                break
    num_finished = sum(len(s.token_ids) for output in outputs.values() for s in output.samples or (output,))
    return Chunk(outputs, engines.clock() - began, engine.stats.output_tokens - num_before - num_finished)


@contextmanager
def _of_default(engines: EngineSource) -> Iterator[None]:
    """Say of a failure that it is the default settings'."""
    try:
        yield
    except CbatchError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise EngineError(f"the default settings do not work: {_describe(engines, error)}") from error


def output_length(output: RequestOutput) -> int:
    """Count the tokens of a result; the mean over its samples, rounded up."""
    samples = output.samples or (output,)
    return math.ceil(sum(len(sample.token_ids) for sample in samples) / len(samples))


def fix_length(prompt: Prompt, length: int) -> Prompt:
    """Make a prompt that takes so many tokens, whatever they are.

    Structured output ends where it is whole, so it can only be cut.
    """
    sampling = replace(prompt.sampling, max_tokens=length, min_tokens=0, stop=(), stop_token_ids=())
    if not is_structured(sampling):
        sampling = replace(sampling, ignore_eos=True)
    return replace(prompt, sampling=sampling)


def _run(engines: EngineSource, settings: Mapping[str, Value], prompts: Sequence[Prompt]) -> Outcome:
    engine = engines.build(settings)
    for prompt in prompts:  # as a run does while others are computed
        engine.prepare(prompt.sampling)
    for _ in engine.steps(iter(_warm_up_prompts(prompts))):
        pass
    memory = engines.used_bytes()
    num_tokens = 0
    began = engines.clock()
    for outputs in engine.steps(iter(prompts)):
        memory = max(memory, engines.used_bytes())
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"row {output.request_id} failed: {output.error.message}")
            num_tokens += sum(len(sample.token_ids) for sample in output.samples or (output,))
    timed_s = engines.clock() - began
    if engine.stats.out_of_memory_steps:
        raise MemoryError
    return Outcome(
        status="ok",
        timed_s=timed_s,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        output_tokens=num_tokens,
        memory_bytes=memory,
    )


def _warm_up_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Make prompts of a few rows' own tokens, backwards, so that no prefix of theirs is one of the sample's."""
    sampling = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    pieces = [prompt.token_ids[-WARM_UP_PROMPT_TOKENS:][::-1] for prompt in prompts[:WARM_UP_PROMPTS]]
    room = min(len(prompt.token_ids) + (prompt.sampling.max_tokens or 0) for prompt in prompts)
    return [Prompt(-1 - i, piece[: max(1, room - WARM_UP_TOKENS)], sampling) for i, piece in enumerate(pieces)]


def _describe(engines: EngineSource, error: Exception) -> str:
    if engines.is_out_of_memory(error):
        return "memory ran out"
    if isinstance(error, CbatchError):
        return error.message
    return f"{type(error).__name__}: {error}"
