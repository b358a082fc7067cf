"""RMS norm: scales every row to unit root mean square, times a weight.

    x        [..., hidden], the last dimension dense
    weight   [hidden] float32 or x's dtype

Computed in float32. Called by the fused modules of cbatch/models/fused.py, through `dispatch`.
Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows: a new dense tensor of x's shape and dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)
