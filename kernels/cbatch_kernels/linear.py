"""Linear layers over weights packed once for oneDNN, with what follows them fused: activation, residual, gate.

    x        [..., in_features]
    weight   [out_features, in_features], packed by `pack_linear`
    other    [..., out_features], combined with the product elementwise

Called by cbatch/models/projections.py. A row's result does not depend on how many rows there are, where
oneDNN packs. Leaves out which layers get packed. Source: oneDNN's inner product with post-ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
Combination = Literal["add", "mul"]

_ONEDNN_ACTIVATIONS = {"silu": ("swish", None), "gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh")}


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A linear layer's parameters, the weight in oneDNN's own layout, opaque to all else."""

    weight: Tensor
    bias: Tensor | None


def refuses_packing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why weights of a dtype cannot be packed here; None where they can."""
    if device.type != "cpu":
        return f"not on {device.type}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this PyTorch has no oneDNN"
    try:
        pack_linear(torch.zeros(8, 8, dtype=dtype))
    except RuntimeError:  # the machine lacks the instructions
        return f"oneDNN has no fast {str(dtype).removeprefix('torch.')} on this CPU"
    return None


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Copy a weight [out_features, in_features] into oneDNN's layout. RuntimeError where the CPU cannot."""
    return LinearWeight(torch.ops.mkldnn._reorder_linear_weight(weight), bias)


def linear(x: Tensor, layer: LinearWeight, activation: Activation | None = None) -> Tensor:
    """Multiply, add the bias, activate: [..., out_features]."""
    name, algorithm = _ONEDNN_ACTIVATIONS[activation] if activation is not None else ("none", None)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, name, [], algorithm)
    return product


def linear_combine(x: Tensor, layer: LinearWeight, other: Tensor, how: Combination) -> Tensor:
    """Multiply, add the bias, then add or multiply `other`: [..., out_features], a new tensor."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, layer.weight, layer.bias, how)
    return product


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """As `linear`, over a weight as PyTorch has it."""
    product = functional.linear(x, weight, bias)
    if activation is None:
        return product
    if activation == "silu":
        return functional.silu(product)
    return functional.gelu(product, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")


def linear_combine_ref(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor, how: Combination) -> Tensor:
    """As `linear_combine`, over a weight as PyTorch has it."""
    product = functional.linear(x, weight, bias)
    return product.add_(other) if how == "add" else product.mul_(other)
