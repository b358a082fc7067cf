"""Launches the compiled paged attention (csrc/paged_attention.h): no copy of the context, no mask.

Arguments and result as in `paged_attention`. What a query token gets does not depend on the batch, to the bit, so this
also serves where `fixed_order_attention` is asked for. Called through `dispatch`, on the CPU.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cbatch_kernels.elements import ELEMENTS, element_name
from cbatch_kernels.metadata import PagedMetadata

HEAD_MULTIPLE = 8  # as in csrc/attention_tile.h
_ENTRY_POINTS = {dtype: f"cbatch_paged_attention_{element_name(dtype)}" for dtype in ELEMENTS}


class AttentionArguments(ctypes.Structure):  # as in csrc/attention_arguments.h; strides count elements
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("result", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_strides", ctypes.c_int64 * 3),  # page, head, slot
        ("value_strides", ctypes.c_int64 * 3),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("context_starts", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("num_decode_rows", ctypes.c_int64),
        ("num_query_tokens", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def refuses_compiled_attention(dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why the kernel cannot run a model; None where it can."""
    if dtype not in ELEMENTS:
        return f"none for {element_name(dtype)}"
    if head_dim % HEAD_MULTIPLE:
        return f"none for heads of {head_dim}, which is no multiple of {HEAD_MULTIPLE}"
    return None


def takes_compiled_attention(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Tell whether the kernel takes these tensors: heads in one piece, all of one dtype."""
    return (
        query.device.type == "cpu"
        and refuses_compiled_attention(query.dtype, query.shape[-1]) is None
        and query.dtype == key_pages.dtype == value_pages.dtype
        and query.stride(-1) == key_pages.stride(-1) == value_pages.stride(-1) == 1
    )


def paged_attention_compiled(
    library: ctypes.CDLL,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    metadata: PagedMetadata,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend a ragged batch over its pages; padding after the batch's last query token gives zeros."""
    num_tokens, num_heads, head_dim = query.shape
    result = query.new_empty(num_tokens, num_heads, head_dim)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    arguments = batch_arguments(metadata, key_pages, value_pages, num_tokens=num_tokens, num_heads=num_heads)
    arguments.query = query.data_ptr()
    arguments.query_token_stride, arguments.query_head_stride = query.stride(0), query.stride(1)
    arguments.result = result.data_ptr()
    arguments.keys, arguments.values = key_pages.data_ptr(), value_pages.data_ptr()
    arguments.sinks = None if sinks is None else sinks.data_ptr()
    arguments.window = sliding_window or 0
    arguments.scaling = scaling
    arguments.softcap = softcap or 0.0
    getattr(library, _ENTRY_POINTS[query.dtype])(ctypes.byref(arguments))
    return result


def batch_arguments(
    metadata: PagedMetadata, key_pages: Tensor, value_pages: Tensor, *, num_tokens: int, num_heads: int
) -> AttentionArguments:
    """Say what is the same for all layers whose pages lie as these do; the caller adds the rest.

    `metadata` must outlive the arguments, which point into it.
    """
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    tables, starts = metadata.block_tables, metadata.context_starts
    assert num_heads % kv_heads == 0
    assert value_pages.shape == key_pages.shape
    assert tables.stride(1) == 1
    return AttentionArguments(  # in the order of its fields: names would take as long as all the rest
        None,
        0,
        0,
        None,
        None,
        None,
        key_pages.stride()[:3],
        value_pages.stride()[:3],
        metadata.cu_seqlens_q.data_ptr(),
        metadata.context_lens.data_ptr(),
        None if starts is None else starts.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        None,
        len(tables),
        metadata.num_decode_rows,
        metadata.num_query_tokens,
        num_tokens,
        num_heads,
        kv_heads,
        head_dim,
        page_size,
        0,
        torch.get_num_threads(),
    )
