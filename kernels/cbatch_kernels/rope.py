"""Rotary position embedding of queries and keys, in place, halves rotated against one another.

    heads      [T, num_heads, head_dim], any strides but a dense last dimension; changed in place
    cos, sin   [T, rotary_dim], rotary_dim <= head_dim: dimensions beyond it stay as they are

Called by the fused attention of cbatch/models/fused.py, through `dispatch`. Leaves out the angles.
Source: RoFormer, arXiv:2104.09864, with the pairing of GPT-NeoX.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_ref(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate every head of every token, in place."""
    rotary_dim = cos.shape[-1]
    rotated = heads[..., :rotary_dim]
    first, second = rotated.chunk(2, dim=-1)
    halves = torch.cat((-second, first), dim=-1)
    rotated.copy_(rotated * cos[:, None] + halves * sin[:, None])
