"""FlashAttention's and FlashInfer's functions for attention over pages, with their signatures, in plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, left: int, softcap: float | None) -> Tensor:
    """One sequence: query [Q, heads, D], keys and values [N, kv_heads, D]; causal, aligned to the end."""
    group = query.shape[1] // keys.shape[1]
    wide = (tensor.repeat_interleave(group, 1).double().transpose(0, 1) for tensor in (keys, values))
    keys, values = wide
    scores = (query.double().transpose(0, 1) @ keys.transpose(1, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(query))[:, None] + keys.shape[1] - len(query)
    key_at = torch.arange(keys.shape[1])
    hidden = (key_at > at) | ((key_at < at - left) if left >= 0 else torch.zeros(1, dtype=torch.bool))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q [B, Q, heads, D], caches [pages, page_size, kv_heads, D]."""
    assert causal
    assert cache_seqlens is not None
    assert block_table is not None
    assert softmax_scale is not None
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    return torch.stack(
        [
            attend(
                one,
                *(cache[table.long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache)),
                softmax_scale,
                window_size[0],
                softcap,
            )
            for one, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True)
        ]
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q [T, heads, D], caches as above."""
    assert block_table is not None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    queries = q.split(cu_seqlens_q.diff().tolist())
    return torch.cat(
        [
            flash_attn_with_kvcache(
                query[None],
                k,
                v,
                cache_seqlens=length[None],
                block_table=table[None],
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
            )[0]
            for query, length, table in zip(queries, cu_seqlens_k.diff(), block_table, strict=True)
        ]
    )


class BatchPrefillWithPagedKVCacheWrapper:
    """Planned once, then run."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert paged_kv_indptr.dtype == paged_kv_indices.dtype == paged_kv_last_page_len.dtype == torch.int32
        self.num_plans += 1
        pages = paged_kv_indices.split(paged_kv_indptr.diff().tolist())
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        self._plan = SimpleNamespace(
            query_lens=qo_indptr.diff().tolist(), pages=pages, lens=lens.tolist(), how=(sm_scale, window_left)
        )
        self._softcap, self._heads = logits_soft_cap, (num_qo_heads, num_kv_heads, head_dim_qk)
        self._types = (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert self._heads == (q.shape[1], paged_kv_cache[0].shape[1], q.shape[2])
        assert self._types == (q.dtype, paged_kv_cache[0].dtype)
        plan = self._plan
        return torch.cat(
            [
                attend(
                    query,
                    *(cache[pages.long()].transpose(1, 2).flatten(0, 1)[:length] for cache in paged_kv_cache),
                    *plan.how,
                    self._softcap,
                )
                for query, pages, length in zip(q.split(plan.query_lens), plan.pages, plan.lens, strict=True)
            ]
        )


FLASH_ATTN: Any = SimpleNamespace(
    flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
)
FLASHINFER: Any = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
