"""Attention by other people's libraries, over our pages and metadata: FlashAttention 2 and FlashInfer.

Each is called as `dispatch.paged_attention` is, and does the same but for what `LIBRARIES` says that it cannot. They
read whole blocks and weigh what a window leaves out with zero, so pages must hold finite numbers from the start.
Written from the libraries' documentation and tested with stand-ins of their call signatures: never run on hardware.

Opened by cbatch/models/attention_library.py, which also holds them to our own result before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.upload import to_device

WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer's documentation gives a wrapper


class Attend(Protocol):
    """One layer's attention over a step's batch."""

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        metadata: PagedMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class FlashAttention:
    """`flash_attn_with_kvcache` for single tokens, `flash_attn_varlen_func` with a block table for prompts."""

    def __init__(self, module: Any, _device: torch.device) -> None:
        self._module = module

    def __call__(
        self,
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
        assert sinks is None
        keys, values = key_pages.transpose(1, 2), value_pages.transpose(1, 2)  # its pages hold tokens, then heads
        how = {
            "softmax_scale": scaling,
            "causal": True,
            "window_size": _window(sliding_window),
            "softcap": softcap or 0.0,
        }
        single, end = metadata.num_decode_rows, metadata.num_query_tokens
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        result[end:].zero_()
        if single > 0:
            result[:single] = self._module.flash_attn_with_kvcache(
                query[:single, None],
                keys,
                values,
                cache_seqlens=metadata.context_lens[:single],
                block_table=metadata.block_tables[:single],
                **how,
            )[:, 0]
        if end > single:
            lens = metadata.context_lens[single:]
            result[single:end] = self._module.flash_attn_varlen_func(
                query[single:end],
                keys,
                values,
                cu_seqlens_q=metadata.cu_seqlens_q[single:] - single,
                cu_seqlens_k=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
                max_seqlen_q=metadata.max_query_len,
                max_seqlen_k=metadata.max_context_len,
                block_table=metadata.block_tables[single:],
                **how,
            )
        return result


class FlashInfer:
    """`BatchPrefillWithPagedKVCacheWrapper` for all sequences; planned on the host once a step and kind of layer."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._wrappers: dict[tuple[object, ...], Any] = {}
        self._planned: dict[tuple[object, ...], PagedMetadata] = {}

    def __call__(
        self,
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
        assert sinks is None
        kind = (query.shape[1:], key_pages.shape[1:], scaling, sliding_window, softcap)
        if kind not in self._wrappers:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[kind] = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        if self._planned.get(kind) is not metadata:
            self._plan(kind, query, key_pages, metadata, scaling, sliding_window, softcap)
            self._planned[kind] = metadata
        result = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        end = metadata.num_query_tokens
        result[:end] = self._wrappers[kind].run(query[:end], (key_pages, value_pages))
        return result

    def _plan(
        self,
        kind: tuple[object, ...],
        query: Tensor,
        key_pages: Tensor,
        metadata: PagedMetadata,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> None:
        kv_heads, page_size = key_pages.shape[1:3]
        lens = metadata.context_lens_host.astype(np.int64)
        num_pages = -(-lens // page_size)
        ends = np.cumsum(num_pages)
        rows = np.repeat(np.arange(len(lens)), num_pages)
        columns = np.arange(int(ends[-1])) - np.repeat(ends - num_pages, num_pages)
        device = key_pages.device
        pages = metadata.block_tables[to_device(rows, device), to_device(columns, device)]
        last = (lens - 1) % page_size + 1
        self._wrappers[kind].plan(
            qo_indptr=metadata.cu_seqlens_q,
            paged_kv_indptr=to_device(np.concatenate(([0], ends)).astype(np.int32), device),
            paged_kv_indices=pages,
            paged_kv_last_page_len=to_device(last.astype(np.int32), device),
            num_qo_heads=query.shape[1],
            num_kv_heads=kv_heads,
            head_dim_qk=query.shape[2],
            page_size=page_size,
            causal=True,
            sm_scale=scaling,
            window_left=_window(sliding_window)[0],
            logits_soft_cap=softcap,
            q_data_type=query.dtype,
            kv_data_type=key_pages.dtype,
        )


def _window(sliding_window: int | None) -> tuple[int, int]:
    """Give how many keys to the left and right of a query's own it sees; -1: all."""
    return (-1, -1) if sliding_window is None else (sliding_window - 1, 0)


@dataclass(frozen=True, slots=True)
class Library:
    """A library, where it is from, and what it can do."""

    name: str
    module: str
    install: str
    head_dims: tuple[int, ...]
    page_multiple: int
    reads_host: bool  # it plans on the host, which a captured step would not do again
    adapt: Callable[[Any, torch.device], Attend]

    def refuses(self, dtype: torch.dtype, head_dim: int) -> str | None:
        """Say why it cannot attend for a model; None where it can."""
        if dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if head_dim not in self.head_dims:
            return f"takes no heads of {head_dim}"
        return None

    def open(self, device: torch.device) -> Attend:
        """Import it. Raises ImportError."""
        return self.adapt(import_module(self.module), device)


LIBRARIES = {
    "flash_attn": Library(
        name="FlashAttention",
        module="flash_attn",
        install="pip install flash-attn --no-build-isolation",
        head_dims=tuple(range(8, 257, 8)),
        page_multiple=256,
        reads_host=False,
        adapt=FlashAttention,
    ),
    "flashinfer": Library(
        name="FlashInfer",
        module="flashinfer",
        install="pip install flashinfer-python",
        head_dims=(64, 128, 256),
        page_multiple=1,
        reads_host=True,
        adapt=FlashInfer,
    ),
}
