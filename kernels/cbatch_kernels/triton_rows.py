"""Operations over the rows of a batch in Triton, for CUDA devices, and for CPUs under Triton's interpreter.

Shapes as in the op of each name: `rms_norm`, `rope_cache_write`, `cache_write`, `gated`. Called by `dispatch`. `choice`
is as in `row_choice`, asked where none is given. Leaves out which implementation runs.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cbatch_kernels.rms_norm import takes_residual
from cbatch_kernels.triton_kernels import rows
from cbatch_kernels.triton_launch import launch
from cbatch_kernels.triton_tiles import row_choice
from cbatch_kernels.tuned_choices import Values


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, choice: Values | None = None
) -> Tensor:
    """Normalise rows; as the reference."""
    assert weight.dtype == torch.float32
    assert weight.is_contiguous()
    assert takes_residual(x, residual)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1]
    rows_per_token = x.shape[1] if x.ndim == 3 else 1
    (num_warps,) = choice or row_choice("rms_norm", x.device, x.dtype, hidden)
    if x.numel() > 0:
        launch(
            rows.rms_norm,
            (x.shape[0] * rows_per_token,),
            x,
            weight,
            residual,
            result,
            eps,
            x.stride(0),
            x.stride(1) if x.ndim == 3 else 0,
            x.stride(-1),
            HIDDEN=hidden,
            HIDDEN_PAD=_pad(hidden),
            ROWS_PER_TOKEN=rows_per_token,
            HAS_RESIDUAL=residual is not None,
            num_warps=num_warps,
        )
    return result


def activate_and_multiply_triton(x: Tensor, activation: str, choice: Values | None = None) -> Tensor:
    """Activate the first half of each row and multiply it by the second; as the reference."""
    assert x.stride(1) == 1
    num_tokens, width = x.shape[0], x.shape[1] // 2
    result = x.new_empty(num_tokens, width)
    most, num_warps = choice or row_choice("activate_and_multiply", x.device, x.dtype, width)
    block = min(most, _pad(width))
    if num_tokens > 0:
        launch(
            rows.activate_and_multiply,
            (num_tokens, triton.cdiv(width, block)),
            x,
            result,
            x.stride(0),
            WIDTH=width,
            BLOCK=block,
            ACTIVATION=activation,
            num_warps=num_warps,
        )
    return result


def rope_cache_write_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    choice: Values | None = None,
) -> None:
    """Rotate and write; as the reference, but that the key's own tensor stays as it is."""
    assert cos.stride() == sin.stride()
    assert cos.stride(-1) == 1
    _write(query, key, value, (cos, sin), key_pages, value_pages, slot_mapping, choice)


def cache_write_triton(
    key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
) -> None:
    """Write T keys and values to their slots, in place; as the reference."""
    _write(None, key, value, None, key_pages, value_pages, slot_mapping)


def takes_triton_write(*tensors: Tensor) -> bool:
    """Tell whether the kernel takes all of these tensors: of one dtype, heads in one piece."""
    return all(tensor.stride(-1) == 1 and tensor.dtype == tensors[0].dtype for tensor in tensors)


def _write(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    choice: Values | None = None,
) -> None:
    num_tokens, kv_heads, head_dim = key.shape
    (num_warps,) = choice or row_choice("rope_cache_write", key.device, key.dtype, head_dim)
    num_heads = query.shape[1] if query is not None else 0
    cos, sin = angles if angles is not None else (key, key)  # which are not read
    rotary_dim = cos.shape[1] if angles is not None else 0
    rotated = query if query is not None else key
    launch(
        rows.rope_cache_write,
        (num_tokens, num_heads + kv_heads),
        rotated,
        key,
        value,
        cos,
        sin,
        key_pages,
        value_pages,
        slot_mapping,
        rotated.stride()[:2],
        key.stride()[:2],
        value.stride()[:2],
        key_pages.stride()[:3],
        value_pages.stride()[:3],
        cos.stride(0),
        NUM_QUERY_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HALF_PAD=_pad(max(1, rotary_dim // 2)),
        HEAD_PAD=_pad(head_dim),
        PAGE_SIZE=key_pages.shape[2],
        num_warps=num_warps,
    )


def _pad(count: int) -> int:
    return int(triton.next_power_of_2(count))
