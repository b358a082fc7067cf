"""What was decided: `EngineConfig`'s open questions answered, each value with its reason.

`check_config` needs no weights and refuses what cannot work; `plan_engine` runs once the weights are in memory, when
what is left for the cache is known. The plan is frozen, printed at the start and kept in the report.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cbatch.config import EngineConfig
from cbatch.engine.cache.build import group_layers
from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS
from cbatch.engine.memory import FreeMemory
from cbatch.engine.scheduler import SCHEDULERS
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.models.inspect import ModelShape
from cbatch.models.load import LoadedModel
from cbatch.units import ceil_div, format_bytes

DEFAULT_PAGE_SIZE = 16  # as vLLM's; wastes half a page per request, under 4 % from 200 tokens on


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What differs by kind of device."""

    max_batch_tokens: int
    max_requests_per_batch: int
    max_memory_percent: float


CPU_DEFAULTS = DeviceDefaults(max_batch_tokens=512, max_requests_per_batch=128, max_memory_percent=0.6)
GPU_DEFAULTS = DeviceDefaults(max_batch_tokens=8192, max_requests_per_batch=1024, max_memory_percent=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Every decided setting; `reasons` says of each why."""

    dtype: str
    device: str
    num_threads: int
    max_model_len: int
    page_size: int
    num_blocks: int  # usable whole-model blocks of page_size tokens
    max_batch_tokens: int
    max_requests_per_batch: int
    max_memory_percent: float
    scheduler_type: str
    allow_block_sharing: bool
    attention: str
    reasons: dict[str, str]

    def settings(self) -> dict[str, dict[str, object]]:
        """Give name → value and reason, for the log and the report."""
        return {name: {"value": getattr(self, name), "reason": reason} for name, reason in self.reasons.items()}


def check_config(config: EngineConfig, shape: ModelShape) -> None:
    """Refuse, before any weights load, what cannot work. Raises UsageError."""
    for name in ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_model_len"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    if config.max_memory_percent is not None and not 0 < config.max_memory_percent <= 1:
        raise UsageError(f"max_memory_percent is {config.max_memory_percent}; it must be above 0 and at most 1")
    if config.scheduler_type is not None and config.scheduler_type not in SCHEDULERS:
        raise UsageError(f"unknown scheduler_type '{config.scheduler_type}'", hint=f"known: {', '.join(SCHEDULERS)}")
    if config.max_model_len is not None and config.max_model_len > shape.context_length:
        raise UsageError(
            f"max_model_len is {config.max_model_len}, but the model's context is {shape.context_length} tokens",
            hint="lower it, or leave it out",
        )


def plan_engine(config: EngineConfig, loaded: LoadedModel, memory: FreeMemory, attention: str) -> EnginePlan:
    """Decide every setting, with `memory` bytes free now that the weights are in. Raises DoesNotFitError."""
    shape, device = loaded.shape, loaded.device
    defaults = CPU_DEFAULTS if device.type == "cpu" else GPU_DEFAULTS
    reasons = {"dtype": loaded.dtype_reason, "device": loaded.device_reason, "num_threads": loaded.num_threads_reason}

    def decide(name: str, asked: int | None, default: int, why: str) -> int:
        reasons[name] = "given" if asked is not None else why
        return default if asked is None else asked

    max_model_len = decide("max_model_len", config.max_model_len, shape.context_length, "the model's context")
    page_size = decide("page_size", config.page_size, DEFAULT_PAGE_SIZE, "default")
    by_device = f"default on {device.type.upper()}"
    max_batch_tokens = decide("max_batch_tokens", config.max_batch_tokens, defaults.max_batch_tokens, by_device)
    max_requests = decide(
        "max_requests_per_batch", config.max_requests_per_batch, defaults.max_requests_per_batch, by_device
    )
    if max_requests > max_batch_tokens:
        max_requests = max_batch_tokens
        reasons["max_requests_per_batch"] = "max_batch_tokens, as every request of a batch computes a token"
    percent = config.max_memory_percent or defaults.max_memory_percent
    reasons["max_memory_percent"] = "given" if config.max_memory_percent else by_device
    budget = memory.num_bytes * percent - _step_bytes(shape, loaded.dtype, max_batch_tokens, max_requests)
    fitting = int(budget // block_bytes(shape, loaded.dtype, page_size)) - NUM_RESERVED_CHUNKS
    usable = max_requests * ceil_div(max_model_len, page_size)
    num_blocks = decide("num_blocks", config.num_blocks, min(fitting, usable), "")
    if config.num_blocks is None:
        limit = f"{percent:.0%} of {format_bytes(memory.num_bytes)} ({memory.source})"
        reasons["num_blocks"] = limit if fitting <= usable else "all that max_requests_per_batch requests can use"
    _check_fit(config, num_blocks, fitting, memory, block_bytes(shape, loaded.dtype, page_size))
    reasons["scheduler_type"] = "given" if config.scheduler_type else "default"
    sharing, reasons["allow_block_sharing"] = _decide_sharing(config, shape, max_model_len)
    reasons["attention"] = "the only implementation for this device"
    return EnginePlan(
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(device),
        num_threads=loaded.num_threads,
        max_model_len=max_model_len,
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_memory_percent=percent,
        scheduler_type=config.scheduler_type or "fifo",
        allow_block_sharing=sharing,
        attention=attention,
        reasons=reasons,
    )


def _decide_sharing(config: EngineConfig, shape: ModelShape, max_model_len: int) -> tuple[bool, str]:
    if any(window is not None for window in group_layers(shape.sliding_windows, max_model_len)):
        return False, "off: the model's sliding-window layers keep no block that another request could use"
    if config.allow_block_sharing is None:
        return True, "on by default: all layers attend to the whole context"
    return config.allow_block_sharing, "given"


def block_bytes(shape: ModelShape, dtype: torch.dtype, page_size: int) -> int:
    """Count the bytes of one page of keys and values in every layer."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * page_size * dtype.itemsize


def _step_bytes(shape: ModelShape, dtype: torch.dtype, max_batch_tokens: int, max_requests: int) -> int:
    """Estimate what one forward pass needs beside weights and cache: activations, logits, index tensors."""
    hidden = 8 * shape.hidden_size + 3 * shape.intermediate_size  # live at once in a layer, values a token
    logits = max_requests * shape.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    indices = 3 * max_batch_tokens * torch.int64.itemsize
    return max_batch_tokens * hidden * dtype.itemsize + logits + indices


def _check_fit(config: EngineConfig, num_blocks: int, fitting: int, memory: FreeMemory, bytes_per_block: int) -> None:
    if 1 <= num_blocks <= fitting:
        return
    have = f"{format_bytes(memory.num_bytes)} ({memory.source})"
    if config.num_blocks is None:
        raise DoesNotFitError(
            f"no memory is left for the KV cache: {have}",
            hint="lower max_batch_tokens or max_requests_per_batch, raise max_memory_percent, or take a smaller model",
        )
    raise DoesNotFitError(
        f"num_blocks {num_blocks} needs {format_bytes(num_blocks * bytes_per_block)}, and there is {have}",
        hint=f"at most {max(fitting, 0)} blocks of this size fit",
    )
