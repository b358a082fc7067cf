"""How scores become weights: what a layer asks of attention, the same for a whole call.

Shared by the implementations in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of attending."""

    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None  # float32 [kv_heads, group]

    @classmethod
    def build(
        cls, kv_heads: int, *, scaling: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Variant:
        """Group sinks [heads] by their KV heads."""
        return cls(scaling, sliding_window, softcap, None if sinks is None else sinks.float().reshape(kv_heads, -1))

    def cap(self, scores: Tensor) -> Tensor:
        """Bound scores smoothly, where that is asked for."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap
