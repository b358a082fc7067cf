"""Cache write: puts a step's new keys and values into the slots of their pages.

    key, value               [T, kv_heads, head_dim], any strides
    key_pages, value_pages   [num_pages, kv_heads, page_size, head_dim], one layer's view, any strides; changed in place
    slot_mapping             int64 [T]: page * page_size + offset; distinct, but for padding that shares a reserved page

Called by every attention layer before it attends (cbatch/models/attention.py), through `dispatch`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cbatch_kernels.elements import ELEMENTS


def cache_write_ref(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
    """Write T keys and values to their slots, in place."""
    page_size = key_pages.shape[2]
    pages, offsets = slot_mapping // page_size, slot_mapping % page_size
    key_pages[pages, :, offsets] = key
    value_pages[pages, :, offsets] = value


class _Copy(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),  # in bytes, as all strides
        ("head_stride", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("page_head_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
    )


class _Arguments(ctypes.Structure):  # as in csrc/cache_write.cpp
    _fields_ = (
        ("copies", _Copy * 2),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


def can_compile_cache_write(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Tell whether `cache_write_compiled` takes these tensors: heads in one piece, of the pages' dtype."""
    tensors = (key, value, key_pages, value_pages)
    same = all(t.stride(-1) == 1 and t.dtype == key.dtype and t.device.type == "cpu" for t in tensors)
    return same and key.dtype in ELEMENTS


def cache_write_compiled(
    library: ctypes.CDLL, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
) -> None:
    """Write T keys and values to their slots, in place; as the reference."""
    num_tokens, kv_heads, head_dim = key.shape
    assert value.shape == key.shape
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.is_contiguous()
    arguments = _Arguments(
        (_Copy * 2)(_describe_copy(key, key_pages), _describe_copy(value, value_pages)),
        slot_mapping.data_ptr(),
        num_tokens,
        kv_heads,
        key_pages.shape[2],
        head_dim * key.itemsize,
        torch.get_num_threads(),
    )
    library.cbatch_cache_write(ctypes.byref(arguments))


def _describe_copy(tokens: Tensor, pages: Tensor) -> _Copy:
    size = tokens.itemsize
    token_stride, head_stride, _ = tokens.stride()
    page_stride, page_head_stride, slot_stride, _ = pages.stride()
    return _Copy(
        tokens.data_ptr(),
        token_stride * size,
        head_stride * size,
        pages.data_ptr(),
        page_stride * size,
        page_head_stride * size,
        slot_stride * size,
    )
