"""Made-up steps on the device, run at the start to see what they take of its memory beside weights and cache.

Called when the plan is made on a CUDA device. Nothing is cached for real: every context lies in the page that padding
reads, every key goes to the one that padding writes. Leaves out what is made of the numbers (plan.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from cbatch_kernels.draw_tokens import DrawRules
from cbatch_kernels.metadata import PagedMetadata

from cbatch.engine.batch import StepInputs
from cbatch.engine.cache.build import build_cache
from cbatch.engine.cache.pool import PADDING_READ_CHUNK, PADDING_WRITE_CHUNK
from cbatch.engine.edits import LogitEdits, Places
from cbatch.engine.runner import ModelRunner
from cbatch.engine.sampling import SamplingBatch
from cbatch.models.attention import AttentionInputs
from cbatch.models.load import LoadedModel
from cbatch.models.memory import is_out_of_memory
from cbatch.units import ceil_div

logger = logging.getLogger(__name__)

FRAGMENTS = 1.1  # the allocator's pieces do not fit one another exactly: reasoned, not measured


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Bytes beside weights and cache."""

    largest: int  # of any step
    decoding: int  # of a forward pass over one token of every request: what its captured form keeps


Measure = Callable[[int, int], MeasuredSteps | None]


class DeviceMemory(Protocol):
    """Reads what is allocated on a device."""

    def begin(self) -> None:
        """Look for the most from here on."""

    def most(self) -> int:
        """Give the most that was allocated since, beyond what was at that time."""


class CudaMemory:
    """PyTorch's own count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def most(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def measure_steps(
    loaded: LoadedModel, memory: DeviceMemory, max_model_len: int, page_size: int, num_tokens: int, num_requests: int
) -> MeasuredSteps | None:
    """Run the largest step, and one that decodes for `num_requests`; None where memory runs out."""
    cache = build_cache(
        loaded.shape.sliding_windows,
        num_blocks=1,
        page_size=page_size,
        max_batch_tokens=num_tokens,
        max_model_len=max_model_len,
        allow_block_sharing=False,
    )
    runner = ModelRunner(loaded, cache.pool, cache.allocators, num_host_pages=0)
    found = []
    for query_lens in (_split(num_tokens, max_model_len), np.ones(num_requests, dtype=np.int32)):
        memory.begin()
        try:
            runner.rehearse(_inputs(loaded, len(cache.allocators), page_size, query_lens, num_requests))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("memory ran out in a made-up step of %d tokens, whose size is estimated", num_tokens)
            return None
        found.append(int(memory.most() * FRAGMENTS))
    return MeasuredSteps(max(found), found[1])


def _split(num_tokens: int, most: int) -> np.typing.NDArray[np.int32]:
    """Share tokens among prompts, the shortest first."""
    rest = [num_tokens % most] if num_tokens % most else []
    return np.array(rest + [most] * (num_tokens // most), dtype=np.int32)


def _inputs(
    loaded: LoadedModel, num_types: int, page_size: int, query_lens: np.typing.NDArray[np.int32], num_results: int
) -> StepInputs:
    """Make a step up that samples for so many requests, each with something to edit and something to cut off."""
    device, num_tokens = loaded.device, int(query_lens.sum())
    tables = torch.full(
        (len(query_lens), ceil_div(int(query_lens.max()), page_size)),
        PADDING_READ_CHUNK,
        dtype=torch.int32,
        device=device,
    )
    slots = torch.full((num_tokens,), PADDING_WRITE_CHUNK * page_size, dtype=torch.int64, device=device)
    starts = np.zeros(len(query_lens), dtype=np.int32)
    metadata = PagedMetadata.build(query_lens, query_lens, tables, starts)
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in query_lens.tolist()])
    rows = np.arange(min(num_results, num_tokens), dtype=np.int64)
    return StepInputs(
        input_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device=device),
        position_ids=torch.from_numpy(positions).to(device)[None],
        attention=[AttentionInputs(slots, metadata) for _ in range(num_types)],
        logits_indices=torch.from_numpy(rows).to(device),
        sampling=_sampling(rows),
        scoring=None,
        result_rows=[range(len(rows))],
    )


def _sampling(rows: np.typing.NDArray[np.int64]) -> SamplingBatch:
    count = len(rows)
    none = Places(rows[:0], rows[:0])
    numbers = np.empty(0, dtype=np.float32)
    return SamplingBatch(
        rows=rows,
        rules=DrawRules(
            temperature=np.ones(count, dtype=np.float32),
            top_p=np.full(count, 0.9, dtype=np.float32),
            top_k=np.zeros(count, dtype=np.int64),
            min_p=np.zeros(count, dtype=np.float32),
            uniform=np.full(count, 0.5),
        ),
        edits=LogitEdits(none, numbers, numbers, none, numbers, Places(rows[:1], rows[:1] * 0), None),
    )
