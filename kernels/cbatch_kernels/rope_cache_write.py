"""Rotary position embedding of a step's queries and keys, and the cache write of its keys and values, in one pass.

    query                    [T, heads, head_dim], any strides but a dense last dimension; rotated in place
    key, value               [T, kv_heads, head_dim], as query; key may be rotated in place too
    cos, sin                 [T, rotary_dim] of the query's dtype; rotary_dim <= head_dim, and dimensions beyond it stay
    key_pages, value_pages   [num_pages, kv_heads, page_size, head_dim], one layer's view; changed in place
    slot_mapping             int64 [T], as in `cache_write`

Halves are rotated against one another, in float32, rounded once. Called by the fused attention of
cbatch/models/attention.py, through `dispatch`. Leaves out the angles.
Source: RoFormer, arXiv:2104.09864, with the pairing of GPT-NeoX.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cbatch_kernels.cache_write import cache_write_ref
from cbatch_kernels.elements import ELEMENTS


def rope_cache_write_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate T queries and keys, and write keys and values to their slots, in place."""
    rope_ref(query, cos, sin)
    rope_ref(key, cos, sin)
    cache_write_ref(key, value, key_pages, value_pages, slot_mapping)


def rope_ref(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate every head [T, heads, head_dim] of every token, in place."""
    rotated = heads[..., : cos.shape[-1]]
    wide = rotated.float()
    first, second = wide.chunk(2, dim=-1)
    halves = torch.cat((-second, first), dim=-1)
    rotated.copy_(wide * cos.float()[:, None] + halves * sin.float()[:, None])


class _Tokens(ctypes.Structure):  # strides count elements, here and below
    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
    )


class _Arguments(ctypes.Structure):  # as in csrc/rope_cache_write.h
    _fields_ = (
        ("query", _Tokens),
        ("key", _Tokens),
        ("value", _Tokens),
        ("key_pages", _Pages),
        ("value_pages", _Pages),
        ("slot_mapping", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("angle_stride", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


def takes_compiled_rope(*tensors: Tensor) -> bool:
    """Tell whether the kernel takes all of these: of one dtype, heads, angles and slots in one piece, on the CPU."""
    first = tensors[0]
    same = all(t.dtype == first.dtype and t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors)
    return same and first.dtype in ELEMENTS


def rope_cache_write_compiled(
    library: ctypes.CDLL,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate and write; as the reference."""
    num_tokens, num_heads, head_dim = query.shape
    rotary_dim = cos.shape[1]
    assert key.shape == value.shape == (num_tokens, key_pages.shape[1], head_dim)
    assert cos.shape == sin.shape == (num_tokens, rotary_dim)
    assert cos.stride() == sin.stride()
    assert rotary_dim <= head_dim
    assert rotary_dim % 2 == 0
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.is_contiguous()
    arguments = _Arguments(
        *((tensor.data_ptr(), *tensor.stride()[:2]) for tensor in (query, key, value)),
        *((tensor.data_ptr(), *tensor.stride()[:3]) for tensor in (key_pages, value_pages)),
        slot_mapping.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.stride(0),
        rotary_dim,
        num_tokens,
        num_heads,
        key.shape[1],
        head_dim,
        key_pages.shape[2],
        ELEMENTS[query.dtype],
        torch.get_num_threads(),
    )
    library.cbatch_rope_cache_write(ctypes.byref(arguments))
