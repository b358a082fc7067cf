"""What was decided: `EngineConfig`'s open questions answered, each value with its reason.

`check_config` needs no weights and refuses what cannot work; `plan_engine` runs once the weights are in memory, when
what is left for the cache is known. The plan is frozen, printed at the start and kept in the report.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from cbatch_kernels.attention_libraries import LIBRARIES
from cbatch_kernels.dispatch import AttentionChoice

from cbatch.compatibility import NO_SHARING, Facts, check
from cbatch.config import EngineConfig
from cbatch.engine.cache.build import group_layers
from cbatch.engine.determinism import check_deterministic
from cbatch.engine.execution import Execution, decide_execution
from cbatch.engine.largest_batch import Q_PADDING, LargestBatch
from cbatch.engine.modes import CHUNKED, MODES, Mode
from cbatch.engine.policies import SCHEDULERS
from cbatch.engine.rehearsal import Measure
from cbatch.engine.sizing import (
    block_bytes,
    page_bytes,
)
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.models.inspect import ModelShape
from cbatch.models.machine import choose_device
from cbatch.models.memory import FreeMemory
from cbatch.models.outline import ModelOutline
from cbatch.units import GIB, ceil_div, format_bytes

DEFAULT_PAGE_SIZE = 16  # as vLLM's; wastes half a page per request, under 4 % from 200 tokens on
MIN_BATCH_TOKENS = 16
KV_PADDING = 1024  # tokens of a context
BY_LOADING = ("dtype", "device", "num_threads", "patched")  # what was decided when the model was loaded
STEP_SHARE = 0.25  # of the memory, at most, for what grows with a step's batch; the rest is cache

COUNTS = (
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_requests_per_batch",
    "max_model_len",
    "q_padding_interval_size",
    "kv_padding_interval_size",
)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What differs by kind of device."""

    max_batch_tokens: int
    max_requests_per_batch: int
    max_memory_percent: float
    max_tokens_with_drafts: int  # up to so many query tokens a step with drafts pays off


CPU_DEFAULTS = DeviceDefaults(
    max_batch_tokens=512, max_requests_per_batch=128, max_memory_percent=0.6, max_tokens_with_drafts=8
)
GPU_DEFAULTS = DeviceDefaults(
    max_batch_tokens=8192, max_requests_per_batch=1024, max_memory_percent=0.9, max_tokens_with_drafts=64
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Every decided setting; `reasons` says of each why."""

    dtype: str
    device: str
    num_threads: int
    patched: bool  # whether fused modules stand in for transformers' own
    mode: str  # how requests are batched, as asked for and not decided
    max_model_len: int
    layer_windows: tuple[int | None, ...]  # tokens that a layer attends to, None for all: the model's, not decided
    page_size: int
    num_blocks: int  # usable whole-model blocks of page_size tokens
    max_batch_tokens: int
    max_requests_per_batch: int
    max_memory_percent: float
    scheduler_type: str
    safety_margin: float
    allow_block_sharing: bool
    cpu_offload_space: float  # GiB
    num_host_pages: int  # that it holds, a page being one layer's
    speculation: int  # query tokens up to which a step is filled with drafts; 0: never
    deterministic: bool
    attention: str
    use_cuda_graph: bool
    use_async_batching: bool
    q_padding_interval_size: int  # query tokens
    kv_padding_interval_size: int  # tokens of a context
    reasons: dict[str, str]

    def settings(self) -> dict[str, dict[str, object]]:
        """Give name → value and reason, for the log and the report."""
        return {name: {"value": getattr(self, name), "reason": reason} for name, reason in self.reasons.items()}


def check_config(config: EngineConfig, shape: ModelShape) -> None:
    """Refuse, before any weights load, what cannot work. Raises UsageError."""
    for name in COUNTS:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    if config.max_memory_percent is not None and not 0 < config.max_memory_percent <= 1:
        raise UsageError(f"max_memory_percent is {config.max_memory_percent}; it must be above 0 and at most 1")
    if config.safety_margin is not None and not 0 <= config.safety_margin < 1:
        raise UsageError(f"safety_margin is {config.safety_margin}; it must be at least 0 and below 1")
    if not 0 <= config.cpu_offload_space < float("inf"):
        raise UsageError(f"cpu_offload_space is {config.cpu_offload_space} GiB; it must be at least 0")
    if config.scheduler_type is not None and config.scheduler_type not in SCHEDULERS:
        raise UsageError(f"unknown scheduler_type '{config.scheduler_type}'", hint=f"known: {', '.join(SCHEDULERS)}")
    if config.deterministic:
        check_deterministic(shape, choose_device(config.device).value)
    library = LIBRARIES.get(config.attention)
    if config.use_cuda_graph or config.use_async_batching or library is not None:
        check(
            Facts(
                cuda_graph=bool(config.use_cuda_graph),
                no_cuda_graph=config.use_cuda_graph is False,
                async_batching=bool(config.use_async_batching),
                speculation=bool(config.speculation),
                attention_library=library is not None,
                attention_plans=library is not None and library.reads_host,
                device=choose_device(config.device).value.type,
                has_experts=shape.has_experts,
            )
        )
    if config.max_model_len is not None and config.max_model_len > shape.context_length:
        raise UsageError(
            f"max_model_len is {config.max_model_len}, but the model's context is {shape.context_length} tokens",
            hint="lower it, or leave it out",
        )


def plan_engine(
    config: EngineConfig,
    loaded: ModelOutline,
    memory: FreeMemory,
    attention: AttentionChoice,
    mode: Mode = MODES[CHUNKED],
    measure: Measure | None = None,
) -> EnginePlan:
    """Decide every setting, with `memory` free now that the weights are in; `measure` runs steps to see what they take.

    Raises DoesNotFitError.
    """
    shape, device = loaded.shape, loaded.device
    defaults = CPU_DEFAULTS if device.type == "cpu" else GPU_DEFAULTS
    by_device = f"default on {device.type.upper()}"
    decided = _Decisions()
    decided.reasons |= {name: getattr(loaded, f"{name}_reason") for name in BY_LOADING}
    max_model_len = decided.choose("max_model_len", config.max_model_len, shape.context_length, "the model's context")
    page_size = decided.choose("page_size", config.page_size, DEFAULT_PAGE_SIZE, "default")
    percent = decided.choose("max_memory_percent", config.max_memory_percent, defaults.max_memory_percent, by_device)
    offload, budget = _plan_budget(config, decided, device, memory, percent)
    steps, reasons = decide_execution(config, loaded, attention)
    decided.reasons |= reasons
    batch = _plan_batch(config, loaded, decided, defaults, max_model_len, budget, steps)
    largest = replace(batch, max_batch_tokens=mode.largest_step(batch.max_batch_tokens, max_model_len))
    largest = largest.measure(measure, config.q_padding_interval_size or Q_PADDING)
    num_blocks = _plan_num_blocks(config, decided, largest, memory, budget)
    scheduler_type = decided.choose("scheduler_type", config.scheduler_type, "fifo", "default")
    margin = SCHEDULERS[scheduler_type].default_safety_margin
    sharing, reason = _decide_sharing(config, shape, max_model_len)
    decided.note("allow_block_sharing", reason)
    q_padding = decided.choose("q_padding_interval_size", config.q_padding_interval_size, Q_PADDING, "default")
    kv_padding = decided.choose("kv_padding_interval_size", config.kv_padding_interval_size, KV_PADDING, "default")
    return EnginePlan(
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(device),
        num_threads=loaded.num_threads,
        patched=loaded.patched,
        mode=mode.name,
        max_model_len=max_model_len,
        layer_windows=shape.sliding_windows,
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=batch.max_batch_tokens,
        max_requests_per_batch=batch.max_requests,
        max_memory_percent=percent,
        scheduler_type=scheduler_type,
        safety_margin=decided.choose("safety_margin", config.safety_margin, margin, f"default of {scheduler_type}"),
        allow_block_sharing=sharing,
        cpu_offload_space=offload,
        num_host_pages=int(offload * GIB) // page_bytes(shape, loaded.dtype, page_size),
        speculation=_plan_speculation(config, decided, defaults, by_device, batch),
        deterministic=steps.deterministic,
        attention=attention.name,
        use_cuda_graph=steps.captured,
        use_async_batching=steps.run_ahead,
        q_padding_interval_size=q_padding,
        kv_padding_interval_size=kv_padding,
        reasons=decided.reasons,
    )


def _plan_budget(
    config: EngineConfig, decided: _Decisions, device: torch.device, memory: FreeMemory, percent: float
) -> tuple[float, float]:
    """Choose the host pool in GiB, and the bytes that cache and steps may take beside it."""
    offload = decided.choose("cpu_offload_space", config.cpu_offload_space or None, 0.0, "off by default")
    budget = memory.num_bytes * percent
    return offload, budget - _check_offload(offload, memory, budget) if device.type == "cpu" else budget


def _check_offload(offload: float, memory: FreeMemory, budget: float) -> float:
    """Return the bytes of a host pool in the cache's own memory, where that leaves any. Raises DoesNotFitError."""
    if offload * GIB < budget or not offload:
        return offload * GIB
    raise DoesNotFitError(
        f"cpu_offload_space {offload:g} GiB leaves nothing for the KV cache: {_may_be_taken(memory, budget)}",
        hint="lower cpu_offload_space, or raise max_memory_percent",
    )


def _may_be_taken(memory: FreeMemory, budget: float) -> str:
    return f"{format_bytes(budget)} of {format_bytes(memory.num_bytes)} ({memory.source}) may be taken"


class _Decisions:
    """Collects the reason of every value as it is chosen."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def note(self, name: str, reason: str) -> None:
        self.reasons[name] = reason

    def choose(self, name: str, asked: Value | None, default: Value, why: str) -> Value:
        self.note(name, "given" if asked is not None else why)
        return default if asked is None else asked


def _plan_batch(
    config: EngineConfig,
    loaded: ModelOutline,
    decided: _Decisions,
    defaults: DeviceDefaults,
    max_model_len: int,
    budget: float,
    steps: Execution,
) -> LargestBatch:
    """Choose the batch's limits: the defaults, halved until a step takes no more than its share of the memory."""
    least_tokens = max(MIN_BATCH_TOKENS, config.max_requests_per_batch or 0)  # each request has one at least
    tokens = config.max_batch_tokens or max(defaults.max_batch_tokens, least_tokens)
    requests = min(config.max_requests_per_batch or defaults.max_requests_per_batch, tokens)
    page_size = config.page_size or DEFAULT_PAGE_SIZE
    first = batch = LargestBatch(loaded.shape, loaded.dtype, tokens, requests, max_model_len, page_size, steps)
    while batch.step().growing > STEP_SHARE * budget:
        if config.max_batch_tokens is None:
            tokens = max(least_tokens, tokens // 2)
        if config.max_requests_per_batch is None:
            requests = max(1, requests // 2)
        smaller = replace(batch, max_batch_tokens=tokens, max_requests=min(requests, tokens))
        if smaller == batch:
            break
        batch = smaller
    by_device = f"default on {loaded.device.type.upper()}"
    scarce = f"halved until a step's batch takes at most {STEP_SHARE:.0%} of the memory"
    if batch.max_batch_tokens < first.max_batch_tokens:
        reason = scarce
    else:
        reason = by_device if batch.max_batch_tokens > least_tokens else "one for each of max_requests_per_batch"
    decided.choose("max_batch_tokens", config.max_batch_tokens, batch.max_batch_tokens, reason)
    if batch.max_requests < first.max_requests:
        reason = scarce
    elif batch.max_requests < defaults.max_requests_per_batch:
        reason = "no more than max_batch_tokens"
    else:
        reason = by_device
    given = config.max_requests_per_batch if batch.max_requests == config.max_requests_per_batch else None
    decided.choose("max_requests_per_batch", given, batch.max_requests, reason)
    return batch


def _plan_num_blocks(
    config: EngineConfig, decided: _Decisions, batch: LargestBatch, memory: FreeMemory, budget: float
) -> int:
    """Choose the size of the cache: what the steps leave, and no more than the largest batch can use."""
    usable = batch.max_requests * ceil_div(batch.max_model_len, batch.page_size)
    most = max(usable, config.num_blocks or 0)
    fitting = max(0, bisect_right(range(most + 1), budget, key=batch.total) - 1)
    kind = "step" if batch.measured is None else "measured step"
    reason = f"what a {kind} leaves of {format_bytes(budget)} (max_memory_percent of the {memory.source})"
    if usable <= fitting:
        reason = "all that max_requests_per_batch requests can use"
    num_blocks = decided.choose("num_blocks", config.num_blocks, min(fitting, usable), reason)
    if 1 <= num_blocks <= fitting:
        return num_blocks
    have = _may_be_taken(memory, budget)
    taken = format_bytes(batch.beside_cache(max(1, num_blocks)))
    step = f"a step of {batch.max_batch_tokens} tokens takes {taken} of it"
    if fitting == 0:
        raise DoesNotFitError(
            f"no memory is left for the KV cache: {have}, and {step}",
            hint="lower page_size, max_batch_tokens, max_requests_per_batch or cpu_offload_space, raise "
            "max_memory_percent, or take a smaller model",
        )
    asked = format_bytes(num_blocks * block_bytes(batch.shape, batch.dtype, batch.page_size))
    raise DoesNotFitError(
        f"num_blocks {num_blocks} needs {asked}, but {have}, and {step}",
        hint=f"at most {fitting} blocks of {batch.page_size} tokens fit",
    )


def _plan_speculation(
    config: EngineConfig,
    decided: _Decisions,
    defaults: DeviceDefaults,
    by_device: str,
    batch: LargestBatch,
) -> int:
    """Choose up to how many tokens a step is filled with drafts."""
    if batch.steps.run_ahead:
        decided.note("speculation", "off: a step is made before the tokens are known that drafts follow from")
        return 0
    if config.speculation is not None:
        decided.note("speculation", "given: drafts fill every step" if config.speculation else "given")
        return batch.max_batch_tokens if config.speculation else 0
    decided.note("speculation", f"drafts fill small steps up to so many tokens: {by_device}")
    return min(defaults.max_tokens_with_drafts, batch.max_batch_tokens)


def _decide_sharing(config: EngineConfig, shape: ModelShape, max_model_len: int) -> tuple[bool, str]:
    if any(window is not None for window in group_layers(shape.sliding_windows, max_model_len)):
        return False, f"off: {NO_SHARING.why}"
    if config.allow_block_sharing is None:
        return True, "on by default: all layers attend to the whole context"
    return config.allow_block_sharing, "given"
