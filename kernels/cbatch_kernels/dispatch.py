"""Which implementation of an op runs: the only place that decides.

Called by cbatch/models. On a CPU the compiled kernels run where the machine could build them and they take the tensors;
on a CUDA device, or under Triton's interpreter, those in Triton; everywhere else the PyTorch references do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from cbatch_kernels.cache_write import cache_write_compiled, cache_write_ref, can_compile_cache_write
from cbatch_kernels.compile import load_kernels
from cbatch_kernels.compiled_attention import (
    paged_attention_compiled,
    refuses_compiled_attention,
    takes_compiled_attention,
)
from cbatch_kernels.draw_tokens import DrawRules, draw_tokens_ref
from cbatch_kernels.fixed_order_attention import fixed_order_attention
from cbatch_kernels.gated import activate_and_multiply_ref
from cbatch_kernels.linear import Activation
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.paged_attention import paged_attention_ref
from cbatch_kernels.rms_norm import rms_norm_compiled, rms_norm_ref, takes_compiled_rms_norm
from cbatch_kernels.rope_cache_write import rope_cache_write_compiled, rope_cache_write_ref, takes_compiled_rope
from cbatch_kernels.tuned_choices import ModelSizes


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What attends, for the settings that a run reports, and whether it takes memory for copies of the context."""

    name: str
    reason: str
    gathers: bool
    reads_host: bool = False  # it looks at a step's lengths on the host, so that no captured step could call it


LARGEST_TRITON_HEAD = 256


@cache
def _has_triton() -> bool:
    """Looked for once: asked before every op."""
    return find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Tell whether kernels in Triton run on a device; does not import it, which takes a while."""
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or is_interpreted) and _has_triton()


def choose_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, fixed_order: bool = False
) -> AttentionChoice:
    """Tell what `paged_attention` runs for a model."""
    if uses_triton(device) and head_dim <= LARGEST_TRITON_HEAD and not fixed_order:
        return AttentionChoice("Triton", "it attends over the pages where they lie", gathers=False)
    if device.type != "cpu":
        reason = f"there are no kernels for {device.type} here"
        if head_dim > LARGEST_TRITON_HEAD:
            reason += f" and heads of {head_dim}"
        elif device.type == "cuda" and not fixed_order:
            reason += ": pip install triton"
    elif (refused := refuses_compiled_attention(dtype, head_dim)) is not None:
        reason = f"the compiled kernels have {refused}"
    elif (kernels := load_kernels(dtype)).library is None:
        reason = kernels.reason
    else:
        return AttentionChoice(f"compiled for {kernels.instructions}", kernels.reason, gathers=False)
    return AttentionChoice("PyTorch in a fixed order" if fixed_order else "PyTorch reference", reason, gathers=True)


def tune(device: torch.device, dtype: torch.dtype, sizes: ModelSizes) -> None:
    """Time the kernels' configurations for a model, where that was not done before; nothing on a CPU."""
    if device.type == "cuda" and uses_triton(device) and sizes.head_dim <= LARGEST_TRITON_HEAD:
        from cbatch_kernels import triton_tuning

        triton_tuning.tune(device, dtype, sizes)


def takes_shared_prefixes(device: torch.device, head_dim: int) -> bool:
    """Tell whether `paged_attention` makes use of `PagedMetadata.prefixes` on a device."""
    return uses_triton(device) and head_dim <= LARGEST_TRITON_HEAD


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    row_multiple: int | None = None,
) -> Tensor:
    """Attend a ragged batch over its pages; as `paged_attention_ref`.

    With a `row_multiple`, as `fixed_order_attention`: what a token gets does not depend on the batch, to the bit.
    """
    attend: Callable[..., Tensor]
    if row_multiple is None and query.shape[2] <= LARGEST_TRITON_HEAD and uses_triton(query.device):
        from cbatch_kernels.triton_attention import paged_attention_triton as attend
    elif (
        takes_compiled_attention(query, key_pages, value_pages)
        and (library := load_kernels(query.dtype).library) is not None
    ):
        attend = partial(paged_attention_compiled, library)  # in a fixed order in any case
    elif row_multiple is not None:
        attend = partial(fixed_order_attention, row_multiple=row_multiple)
    else:
        attend = paged_attention_ref
    return attend(
        query,
        key_pages,
        value_pages,
        metadata,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


def cache_write(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots, in place; as `cache_write_ref`."""
    if uses_triton(key.device):
        from cbatch_kernels.triton_rows import cache_write_triton, takes_triton_write

        if takes_triton_write(key, value, key_pages, value_pages):
            return cache_write_triton(key, value, key_pages, value_pages, slot_mapping)
    takes = can_compile_cache_write(key, value, key_pages, value_pages)
    if takes and (library := load_kernels(key.dtype).library) is not None:
        return cache_write_compiled(library, key, value, key_pages, value_pages, slot_mapping)
    return cache_write_ref(key, value, key_pages, value_pages, slot_mapping)


def rope_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate queries and keys and write keys and values to their slots, in place; as `rope_cache_write_ref`."""
    tensors = (query, key, value, cos, sin, key_pages, value_pages)
    if uses_triton(query.device):
        from cbatch_kernels.triton_rows import rope_cache_write_triton, takes_triton_write

        if takes_triton_write(*tensors):
            return rope_cache_write_triton(*tensors, slot_mapping)
    if takes_compiled_rope(*tensors) and (library := load_kernels(query.dtype).library) is not None:
        return rope_cache_write_compiled(library, *tensors, slot_mapping)
    return rope_cache_write_ref(*tensors, slot_mapping)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise rows, and add the residual where there is one; as `rms_norm_ref`."""
    if uses_triton(x.device):
        from cbatch_kernels.triton_rows import rms_norm_triton

        return rms_norm_triton(x, weight, eps, residual)
    if takes_compiled_rms_norm(x) and (library := load_kernels(x.dtype).library) is not None:
        return rms_norm_compiled(library, x, weight, eps, residual)
    return rms_norm_ref(x, weight, eps, residual)


def activate_and_multiply(x: Tensor, activation: Activation) -> Tensor:
    """Activate the first half of each row and multiply it by the second; as `activate_and_multiply_ref`."""
    if uses_triton(x.device) and x.stride(1) == 1:
        from cbatch_kernels.triton_rows import activate_and_multiply_triton

        return activate_and_multiply_triton(x, activation)
    return activate_and_multiply_ref(x, activation)


def draw_tokens(logits: Tensor, rules: DrawRules) -> Tensor:
    """Draw a token per row of logits; as `draw_tokens_ref`."""
    if uses_triton(logits.device) and logits.stride(1) == 1:
        from cbatch_kernels.triton_sampling import draw_tokens_triton

        return draw_tokens_triton(logits, rules)
    return draw_tokens_ref(logits, rules)
