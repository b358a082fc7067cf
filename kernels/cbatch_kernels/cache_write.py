"""Cache write: puts a step's new keys and values into the slots of their pages.

    key, value               [T, kv_heads, head_dim], any strides
    key_pages, value_pages   [num_pages, kv_heads, page_size, head_dim], one layer's view, any strides; changed in place
    slot_mapping             int64 [T]: page * page_size + offset; distinct, but for padding that shares a reserved page

Called by every attention layer before it attends (cbatch/models/attention.py), through `dispatch`.
"""

from __future__ import annotations

from torch import Tensor


def cache_write_ref(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
    """Write T keys and values to their slots, in place."""
    page_size = key_pages.shape[2]
    pages, offsets = slot_mapping // page_size, slot_mapping % page_size
    key_pages[pages, :, offsets] = key
    value_pages[pages, :, offsets] = value
