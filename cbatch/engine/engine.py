"""The engine: prompts in, results out. `steps` is the whole loop: schedule, launch, collect, update.

Where batching is asynchronous a step is launched before the results of the one before it are collected, else they are
collected at once. `cbatch run` and the Python API use it alike. It knows nothing of files and rows.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.cache.build import build_cache
from cbatch.engine.cache.manager import CacheLoad, CacheManager
from cbatch.engine.determinism import row_multiple
from cbatch.engine.grammar import Grammars
from cbatch.engine.graphs import CudaCapture
from cbatch.engine.intake import Intake
from cbatch.engine.modes import CHUNKED, MODES, Mode
from cbatch.engine.observer import Observer, RequestEvent, StepRecorder, StepTimes
from cbatch.engine.output import empty_output, failed_output, finished_output
from cbatch.engine.plan import DEFAULT_PAGE_SIZE, EnginePlan, check_config, plan_engine
from cbatch.engine.rehearsal import CudaMemory, Measure, measure_steps
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.runner import ModelRunner
from cbatch.engine.samples import SampleGroups
from cbatch.engine.stats import EngineStats
from cbatch.engine.step import FinishedRequest, RunningStep, StepLimits, StepPlan
from cbatch.errors import DoesNotFitError, EngineError, RowError
from cbatch.models.attention_library import choose_attention, open_library
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from cbatch.models.memory import FreeMemory, free_memory, is_out_of_memory
from cbatch.models.outline import ModelOutline
from cbatch.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_SLEEP_S = 0.001  # between looks at a source of prompts that has nothing ready


class Runner(Protocol):
    """What computes a step; the engine's tests and simulations bring their own."""

    def launch(self, plan: StepPlan) -> RunningStep:
        """Begin to compute a step, behind those that were launched before; requests may change from here on."""

    def settle(self) -> None:
        """Wait for what was launched and nobody collects any more: the next step may change what that still reads."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step whose results are not booked yet."""

    plan: StepPlan
    running: RunningStep
    load: CacheLoad  # while its blocks are all in use
    began: float  # to be scheduled; monotonic seconds, as the next
    scheduled: float
    events: list[RequestEvent]


class Engine:
    """Continuous batching over one loaded model."""

    def __init__(
        self,
        config: EngineConfig,
        plan: EnginePlan,
        loaded: ModelOutline,
        cache: CacheManager,
        runner: Runner,
        mode: Mode = MODES[CHUNKED],
    ) -> None:
        self.config = config
        self.plan = plan
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.generation_defaults = loaded.generation_defaults
        self.load_s = 0.0
        self.stats = EngineStats()
        grammars = Grammars(loaded.tokenizer.as_json, loaded.num_choosable, loaded.eos_token_ids)
        self._intake = Intake(cache, plan.max_model_len, loaded.tokenizer, loaded.eos_token_ids, grammars)
        self._groups = SampleGroups()
        self._cache = cache
        self._runner = runner
        limits = StepLimits(
            plan.max_batch_tokens,
            plan.max_requests_per_batch,
            max_pages_read=cache.pool.num_usable * cache.pool.pages_per_chunk,
            max_tokens_with_drafts=plan.speculation,
        )
        self._scheduler = mode.make_scheduler(
            plan.scheduler_type,
            cache,
            limits,
            safety_margin=plan.safety_margin,
            num_host_pages=plan.num_host_pages,
        )
        self._window = self._scheduler.waiting_batches * plan.max_requests_per_batch
        self._in_flight: deque[_InFlight] = deque()
        self._most_in_flight = 1 if plan.use_async_batching else 0  # while the next results are waited for
        self._began: float | None = None
        self._ended = 0.0  # of the last step that was booked
        self._recorder: StepRecorder | None = None

    @classmethod
    def load(cls, config: EngineConfig, mode: Mode = MODES[CHUNKED]) -> Engine:
        """Load the model and decide the plan. Raises UsageError, before any weights load where possible."""
        began = time.perf_counter()
        shape = inspect_model(config)
        check_config(config, shape)
        engine = cls.over(load_model(config, shape), config, mode)
        engine.load_s = time.perf_counter() - began
        return engine

    @classmethod
    def over(cls, loaded: LoadedModel, config: EngineConfig, mode: Mode = MODES[CHUNKED]) -> Engine:
        """Build an engine around a model that is in memory already. Raises UsageError."""
        plan = plan_over(loaded, config, mode)
        cache = build_cache(
            loaded.shape.sliding_windows,
            num_blocks=plan.num_blocks,
            page_size=plan.page_size,
            max_batch_tokens=mode.largest_step(plan.max_batch_tokens, plan.max_model_len),
            max_model_len=plan.max_model_len,
            allow_block_sharing=plan.allow_block_sharing,
        )
        # Where it costs nothing there is nothing to be done for it.
        rows = row_multiple(loaded) if config.deterministic else None
        attend = open_library(config, loaded, plan.page_size)
        try:
            runner = ModelRunner(loaded, cache.pool, cache.allocators, plan.num_host_pages, rows, attend)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            beside = f" and {plan.cpu_offload_space:g} GiB beside it" if plan.cpu_offload_space else ""
            raise DoesNotFitError(
                f"the memory for a KV cache of {plan.num_blocks} blocks{beside} is not to be had",
                hint="lower num_blocks, max_memory_percent or cpu_offload_space",
            ) from error
        if plan.use_cuda_graph:
            runner.replay_on(
                CudaCapture(),
                max_rows=plan.max_requests_per_batch,
                q_padding_interval_size=plan.q_padding_interval_size,
                kv_padding_interval_size=plan.kv_padding_interval_size,
                num_sets=2 if plan.use_async_batching else 1,
            )
        if plan.use_async_batching:
            runner.transfer_beside()
        return cls(config, plan, loaded, cache, runner, mode)

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every step from now on."""
        self._recorder = StepRecorder(observer)

    def prepare(self, params: SamplingParams) -> None:
        """Make ready what prompts with such parameters need beside the model: it takes time only once."""
        self._intake.prepare(params)

    def check(self, prompt: Prompt) -> list[int]:
        """Count the tokens that each of a prompt's samples may get. Raises RowError where it can never work."""
        return [request.max_tokens for request in self._intake.requests(prompt)]

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[RequestOutput]:
        """Complete `prompts`, read lazily; results come in the order in which they finish."""
        for outputs in self.steps(iter(prompts)):
            yield from outputs

    def steps(self, prompts: Iterator[Prompt | None]) -> Iterator[list[RequestOutput]]:
        """Give one list of finished requests per step until `prompts` and the queue are empty.

        Pulls from `prompts` only while few requests wait. None means that nothing is ready now: the engine goes on
        with what it has, and looks again at the next step.
        """
        exhausted = is_dry = False
        try:
            while not exhausted or self._scheduler.has_work:
                outputs: list[RequestOutput] = []
                is_dry = False
                while not exhausted and len(self._scheduler.waiting) + len(outputs) < self._window:
                    prompt = next(prompts, _EXHAUSTED)
                    if prompt is None:
                        is_dry = True
                        break
                    if isinstance(prompt, _Exhausted):
                        exhausted = True
                    elif (failed := self._submit(prompt)) is not None:
                        outputs.append(failed)
                if self._scheduler.has_work:
                    num_booked = self.stats.steps
                    outputs.extend(self._step())
                    self.stats.starved_steps += is_dry and self._has_room and self.stats.steps > num_booked
                elif not exhausted and not outputs:
                    self._wait()
                yield outputs
        finally:
            self._groups.clear()
            if self._recorder is not None:
                self._recorder.forget()
            self._scheduler.abandon()  # what a caller that stops early leaves behind is no part of its next call
            self._in_flight.clear()
            self._runner.settle()

    def drop_waiting(self) -> list[int]:
        """Forget the prompts of which nothing ever ran, and return their ids."""
        dropped = self._scheduler.drop_waiting()
        counts = Counter(request.request_id for request in dropped)
        for request in dropped:
            if counts[request.request_id] < request.prompt.sampling.n:  # other samples of it run
                self._scheduler.add(request)
        return list(dict.fromkeys(r.request_id for r in dropped if counts[r.request_id] == r.prompt.sampling.n))

    def _step(self) -> list[RequestOutput]:
        """Launch a step, and book the oldest one once no more may be in flight, or nothing else can be done."""
        began = time.perf_counter()
        plan = self._scheduler.schedule(began)
        if plan.items:
            self._in_flight.append(self._launch(plan, began))
        if plan.items and len(self._in_flight) <= self._most_in_flight:
            return []
        return self._finish(self._in_flight.popleft())

    def _launch(self, plan: StepPlan, began: float) -> _InFlight:
        """Launch a step, a smaller one each time that memory runs out. Raises EngineError."""
        scheduled = time.perf_counter()
        while (running := self._try(plan)) is None:
            self.stats.out_of_memory_steps += 1
            if self._scheduler.limits.max_batch_tokens == 1:
                raise EngineError(
                    "memory ran out in a step of a single token",
                    hint="lower num_blocks or max_memory_percent, which leaves more to the steps, or free memory",
                )
            plan = self._scheduler.halve(plan)
            logger.warning(
                "memory ran out in a step; from here on a step has at most %d tokens",
                self._scheduler.limits.max_batch_tokens,
            )
        self._scheduler.launch(plan)
        load = self._cache.load(self._scheduler.num_filled())
        events = [] if self._recorder is None else self._recorder.changes(self._scheduler.active, began)
        return _InFlight(plan, running, load, began, scheduled, events)

    def _finish(self, step: _InFlight) -> list[RequestOutput]:
        """Wait for a step's results and book them; give what they end."""
        plan = step.plan
        results = step.running.collect()
        ran = time.perf_counter()
        had = [len(item.request.token_ids) for item in plan.items]
        finished = self._scheduler.update(plan, results, ran)
        ended = time.perf_counter()
        self._began = step.began if self._began is None else self._began
        self.stats.generate_s = ended - self._began
        self.stats.schedule_s += (step.scheduled - step.began) + (ended - ran)
        self._count(plan, finished)
        self._count_tokens(plan, had)
        self._count_cache(plan, step.load, step.began - self._began)
        if self._recorder is not None:
            # A step that was launched early has the device, and the observer, from the end of the one before.
            began, scheduled = max(step.began, self._ended), max(step.scheduled, self._ended)
            times = StepTimes(began, scheduled, ran, ended)
            self._recorder.record(self._scheduler, plan, step.load, finished, times, step.events)
        self._ended = ended
        outputs = (self._groups.collect(f.request, finished_output(f, ended)) for f in finished)
        return [output for output in outputs if output is not None]

    def _try(self, plan: StepPlan) -> RunningStep | None:
        """Launch a step, or give None where memory runs out.

        The error ends here, and with it its traceback, whose frames hold the step's tensors.
        """
        try:
            return self._runner.launch(plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use
        return None

    def _submit(self, prompt: Prompt) -> RequestOutput | None:
        """Queue a prompt, or answer at once where it can never work."""
        try:
            requests = self._intake.requests(prompt)
        except RowError as error:
            return failed_output(prompt, error)
        output = None
        for request in requests:
            if request.max_tokens > 0 or request.scores_prompt:
                self._scheduler.add(request)
            else:
                output = self._groups.collect(request, empty_output(request))
        return output

    def _count(self, plan: StepPlan, finished: Sequence[FinishedRequest]) -> None:
        stats = self.stats
        stats.steps += 1
        stats.num_running = len(self._scheduler.active)
        stats.num_waiting = len(self._scheduler.waiting)
        stats.offloads += plan.moves.num_offloads
        stats.restores += plan.moves.num_restores
        stats.soft_resets += plan.moves.num_soft_resets
        stats.preemptions += plan.moves.num_offloads + plan.moves.num_soft_resets
        stats.cache_usage = self._cache.usage
        for request in (f.request for f in finished):
            if request.sample == 0:  # a prompt counts once
                stats.prompt_tokens += request.num_prompt_tokens
                stats.cached_tokens += request.cached_tokens
            stats.computed_tokens += request.computed_tokens
            stats.recomputed_tokens += request.recomputed_tokens

    def _count_tokens(self, plan: StepPlan, had: Sequence[int]) -> None:
        """Count what the step's requests, which `had` so many tokens, got by it."""
        num_new = [len(item.request.token_ids) - before for item, before in zip(plan.items, had, strict=True)]
        self.stats.output_tokens += sum(num_new)
        self.stats.drafted_tokens += sum(len(item.drafts) for item in plan.items if item.drafts)
        self.stats.accepted_tokens += sum(count - 1 for count in num_new if count > 1)

    def _count_cache(self, plan: StepPlan, load: CacheLoad, at_s: float) -> None:
        stats = self.stats
        stats.usage_sum += load.usage
        stats.max_cache_usage = max(stats.max_cache_usage, load.usage)
        if load.waste is not None:
            stats.waste_sum += load.waste
            stats.waste_steps += 1
        composition = (plan.num_tokens - plan.num_decode_tokens, plan.num_decode_tokens)
        requests = (max(stats.num_running, len(plan.items)), stats.num_waiting)
        num_moved = plan.moves.num_offloads + plan.moves.num_soft_resets
        stats.series.add(at_s, (*composition, *requests, load.usage, load.waste or 0.0, num_moved))

    @property
    def _has_room(self) -> bool:
        """Whether one more request could have been in the last step, were it there."""
        scheduler = self._scheduler
        return not scheduler.waiting and len(scheduler.active) < scheduler.limits.max_requests_per_batch

    def _wait(self) -> None:
        """Give the source of prompts a moment."""
        began = time.perf_counter()
        time.sleep(IDLE_SLEEP_S)
        self.stats.idle_s += time.perf_counter() - began if self._began is not None else 0.0


def plan_over(
    loaded: ModelOutline, config: EngineConfig, mode: Mode = MODES[CHUNKED], memory: FreeMemory | None = None
) -> EnginePlan:
    """Decide the plan of an engine around a model that is in memory already, or would leave `memory` free.

    Raises UsageError.
    """
    check_config(config, loaded.shape)
    attention = choose_attention(config, loaded)
    measure: Measure | None = None
    if isinstance(loaded, LoadedModel) and loaded.device.type == "cuda" and not attention.gathers:
        measure = partial(
            measure_steps,
            loaded,
            CudaMemory(loaded.device),
            config.max_model_len or loaded.shape.context_length,
            config.page_size or DEFAULT_PAGE_SIZE,
        )
    return plan_engine(config, loaded, memory or free_memory(loaded.device), attention, mode, measure)


class _Exhausted:
    """Marks the end of the prompts, where None already means something else."""


_EXHAUSTED = _Exhausted()
