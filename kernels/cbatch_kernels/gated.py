"""The middle of a gated MLP: what the first half of a row is activated to, times the second half.

    x        [T, 2 * width], the last dimension dense
    result   [T, width], contiguous

Computed in float32, rounded once. Called by cbatch/models/projections.py, through `dispatch`, where the product before
it cannot do this itself. Source: GLU variants, arXiv:2002.05202.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from cbatch_kernels.linear import Activation


def activate_and_multiply_ref(x: Tensor, activation: Activation) -> Tensor:
    """Activate the first half of each row and multiply it by the second."""
    gate, factor = x.float().chunk(2, dim=-1)
    if activation == "silu":
        active = functional.silu(gate)
    else:
        active = functional.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
    return (active * factor).to(x.dtype)
