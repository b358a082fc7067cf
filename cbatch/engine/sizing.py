"""How many bytes each consumer of memory takes: one formula a consumer, added up by the plan.

Checked against the peak of real runs by the tests. Leaves out what is decided with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS
from cbatch.models.inspect import ModelShape

SAMPLING_BYTES = 2 * torch.float32.itemsize + 2 * torch.float64.itemsize  # logits, scaled; probabilities, their sums
INDEX_TENSORS = 4  # token ids, positions, slots of two attention types
GATHERED_TOKENS = 16_384  # context that the reference attention copies out of the pages at a time
QUERY_TILE = 256  # query tokens that it scores at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFootprint:
    """Bytes that one forward pass takes beside weights and cache."""

    activations: int
    attention: int  # context gathered and scored by attention without a compiled kernel; its masks
    logits: int
    index_tensors: int

    @property
    def total(self) -> int:
        return self.activations + self.attention + self.logits + self.index_tensors


def step_footprint(
    shape: ModelShape, dtype: torch.dtype, *, max_batch_tokens: int, max_requests: int, max_model_len: int
) -> StepFootprint:
    """Add up what a pass of the largest batch holds at once."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    in_attention = 2 * shape.hidden_size + 3 * heads  # residual, normed; q, k, v, rotated and once more in between
    in_mlp = 2 * shape.hidden_size + 4 * shape.intermediate_size  # gate, up, activated, their product
    gathered = 2 * max(GATHERED_TOKENS, max_model_len) * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    scores = min(QUERY_TILE, max_batch_tokens) * max_model_len * (shape.num_heads * torch.float32.itemsize + 1)
    return StepFootprint(
        activations=max_batch_tokens * max(in_attention, in_mlp) * dtype.itemsize,
        attention=gathered + scores,
        logits=max_requests * shape.vocab_size * (dtype.itemsize + SAMPLING_BYTES),
        index_tensors=INDEX_TENSORS * max_batch_tokens * torch.int64.itemsize,
    )


def page_bytes(shape: ModelShape, dtype: torch.dtype, page_size: int) -> int:
    """Count the bytes of a page of one layer, keys and values."""
    return 2 * shape.num_kv_heads * shape.head_dim * page_size * dtype.itemsize


def block_bytes(shape: ModelShape, dtype: torch.dtype, page_size: int) -> int:
    """Count the bytes of a whole-model block: a page of every layer."""
    return shape.num_layers * page_bytes(shape, dtype, page_size)


def num_blocks_in(budget: float, shape: ModelShape, dtype: torch.dtype, page_size: int, pages_per_chunk: int) -> int:
    """Count the whole-model blocks that `budget` bytes hold, beside the reserved chunks."""
    pages = int(budget // page_bytes(shape, dtype, page_size)) - NUM_RESERVED_CHUNKS * pages_per_chunk
    return pages // pages_per_chunk * pages_per_chunk // shape.num_layers
