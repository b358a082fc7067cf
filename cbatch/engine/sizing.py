"""How many bytes each consumer of memory takes: one formula a consumer, added up by the plan.

The numbers follow from what the forward pass, attention and the sampler allocate. A test holds their sum, with cache
and what loading took, to a tenth of the measured peak of a random Llama with small caches and large ones, on a CPU in
float32. On a CUDA device steps are measured instead (rehearsal.py), once the batch is chosen. Leaves out what is
decided with it, and what is there before: the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cbatch_kernels.draw_tokens import MAX_DRAWN

from cbatch.engine.cache.pool import NUM_RESERVED_CHUNKS
from cbatch.models.inspect import ModelShape
from cbatch.units import MIB, ceil_div

INDEX_TENSORS = 4  # token ids, positions, slots of two attention types
GATHERED_TOKENS = 16_384  # context that the reference attention copies out of the pages at a time
QUERY_TILE = 256  # query tokens that it scores at a time
HEAP_BYTES = 32 * MIB  # freed pieces that the allocator keeps; glibc gives larger ones than this back at once
HEAP_BYTES_IN_ONE_CALL = 16 * MIB  # where layers share one piece
DRAWING_BYTES = 56  # per logit: probabilities in float64, sorted ones, their shares and sums, and what makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFootprint:
    """Bytes that one forward pass takes beside weights and cache."""

    activations: int
    attention: int  # context gathered and scored where no compiled kernel attends; its masks
    logits: int
    index_tensors: int
    heap: int  # kept by the allocator

    @property
    def total(self) -> int:
        """The most at any moment: the layers are done when the logits are made."""
        return max(self.activations + self.attention, self.logits) + self.index_tensors + self.heap

    @property
    def growing(self) -> int:
        """The part that a larger batch makes larger."""
        return max(self.activations, self.logits) + self.index_tensors


def step_footprint(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    max_batch_tokens: int,
    max_requests: int,
    max_context: int,
    gathers: bool,
    in_one_call: bool,
    num_buffers: int = 1,
) -> StepFootprint:
    """Add up what a pass of the largest batch holds at once, none of whose contexts is longer than `max_context`.

    `gathers` tells whether attention copies the context out of the pages, as the reference does, `in_one_call` whether
    all layers share one workspace; there are `num_buffers` sets of what a pass reads and gives.
    """
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    in_attention = 2 * shape.hidden_size + 3 * heads  # residual, normed; q, k, v, rotated and once more in between
    in_mlp = 2 * shape.hidden_size + 4 * shape.intermediate_size  # gate, up, activated, their product
    if in_one_call:  # heads are rotated and gates are multiplied where they lie
        in_attention = 2 * shape.hidden_size + heads + shape.num_heads * shape.head_dim
        in_mlp = 2 * shape.hidden_size + shape.intermediate_size
    gathered = 2 * max(GATHERED_TOKENS, max_context) * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    scores = min(QUERY_TILE, max_batch_tokens) * max_context * (shape.num_heads * torch.float32.itemsize + 1)
    num_logits = max_requests * shape.vocab_size
    drawn = min(num_logits, max(shape.vocab_size, MAX_DRAWN))
    return StepFootprint(
        activations=max_batch_tokens * max(in_attention, in_mlp) * dtype.itemsize,
        attention=gathered + scores if gathers else 0,
        # As the model gives them, and a copy in float32 that sampling changes.
        logits=num_logits * (num_buffers * dtype.itemsize + torch.float32.itemsize) + drawn * DRAWING_BYTES,
        index_tensors=num_buffers * INDEX_TENSORS * max_batch_tokens * torch.int64.itemsize,
        heap=HEAP_BYTES_IN_ONE_CALL if in_one_call else HEAP_BYTES,
    )


def captured_logits_bytes(shape: ModelShape, dtype: torch.dtype, *, max_requests: int, interval: int) -> int:
    """Count the bytes of the logits that captured steps write to, rows padded to a multiple of `interval`."""
    return ceil_div(max_requests, interval) * interval * shape.vocab_size * dtype.itemsize


def longest_context(shape: ModelShape, dtype: torch.dtype, cache_bytes: float, max_model_len: int) -> int:
    """Count the tokens that a single request could have at most: those that a cache of so many bytes holds."""
    num_full_layers = shape.sliding_windows.count(None)
    if num_full_layers == 0:
        return max_model_len
    return min(max_model_len, int(cache_bytes // (num_full_layers * page_bytes(shape, dtype, page_size=1))))


def page_bytes(shape: ModelShape, dtype: torch.dtype, page_size: int) -> int:
    """Count the bytes of a page of one layer, keys and values."""
    return 2 * shape.num_kv_heads * shape.head_dim * page_size * dtype.itemsize


def block_bytes(shape: ModelShape, dtype: torch.dtype, page_size: int) -> int:
    """Count the bytes of a whole-model block: a page of every layer."""
    return shape.num_layers * page_bytes(shape, dtype, page_size)


def cache_bytes(shape: ModelShape, dtype: torch.dtype, page_size: int, num_blocks: int, pages_per_chunk: int) -> int:
    """Count the bytes of a cache of whole-model blocks: whole chunks, and the reserved ones."""
    num_chunks = ceil_div(num_blocks * shape.num_layers, pages_per_chunk) + NUM_RESERVED_CHUNKS
    return num_chunks * pages_per_chunk * page_bytes(shape, dtype, page_size)
