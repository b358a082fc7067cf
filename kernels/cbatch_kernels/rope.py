"""Rotary position embedding of queries and keys, in place, halves rotated against one another.

    heads      [T, num_heads, head_dim], any strides but a dense last dimension; changed in place
    cos, sin   [T, rotary_dim] of heads' dtype; rotary_dim <= head_dim, and dimensions beyond it stay as they are

Computed in float32, rounded once. Called by the fused attention of cbatch/models/fused.py, through `dispatch`. Leaves
out the angles.
Source: RoFormer, arXiv:2104.09864, with the pairing of GPT-NeoX.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cbatch_kernels.elements import ELEMENTS


def rope_ref(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate every head of every token, in place."""
    rotated = heads[..., : cos.shape[-1]]
    wide = rotated.float()
    first, second = wide.chunk(2, dim=-1)
    halves = torch.cat((-second, first), dim=-1)
    rotated.copy_(wide * cos.float()[:, None] + halves * sin.float()[:, None])


class _Arguments(ctypes.Structure):  # as in csrc/rope.cpp; strides count elements
    _fields_ = (
        ("heads", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("angle_stride", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


def takes_compiled_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Tell whether the kernel takes these tensors: of one dtype, heads and angles in one piece, on the CPU."""
    tensors = (heads, cos, sin)
    same = all(t.dtype == heads.dtype and t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors)
    return same and heads.dtype in ELEMENTS and cos.stride() == sin.stride()


def rope_compiled(library: ctypes.CDLL, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate every head of every token, in place; as the reference."""
    num_tokens, num_heads, head_dim = heads.shape
    assert cos.shape == sin.shape
    assert cos.shape[0] == num_tokens
    assert cos.shape[1] <= head_dim
    assert cos.shape[1] % 2 == 0
    arguments = _Arguments(
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_tokens,
        num_heads,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        cos.shape[1],
        ELEMENTS[heads.dtype],
        torch.get_num_threads(),
    )
    library.cbatch_rope(ctypes.byref(arguments))
