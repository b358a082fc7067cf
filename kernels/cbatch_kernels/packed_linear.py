"""Linear layers in float32 over compiled products: weights packed once, with what follows them fused.

    x          float32 [T, in_features], the last dimension dense
    residual   float32 [T, out_features], the last dimension dense; added to the result
    result     float32 [T, out_features], contiguous; of a gated pair activation(gate(x)) * up(x)

Weights that bfloat16 holds exactly, as most published ones, are kept in it: half the bytes are read, for the same
numbers. Sums are float32, over the inputs one by one: a row's result does not depend on the others, to the bit.

Called by cbatch/models/projections.py. Leaves out which layers there are, and machines without a compiler.
Source: the outer products of GotoBLAS (Goto and van de Geijn, TOMS 2008).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch_kernels.huge_pages import HugeSlabs
from cbatch_kernels.linear import Activation

ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2}  # as in the source


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One linear layer, or a gated pair of them."""

    panels: Tensor  # [panels, in_features, panel]; of a gated pair those of both, one after the other; see `unpack`
    bias: Tensor | None  # [out_features], of a gated pair twice as many
    out_features: int
    activation: Activation | None = None
    is_gated: bool = False


class _Arguments(ctypes.Structure):  # as in csrc/linear.h; strides count elements
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("result_stride", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


def takes_activation(activation: Activation) -> bool:
    """Tell whether a gated pair may have this one."""
    return activation in ACTIVATIONS


def pack_weight(library: ctypes.CDLL, slabs: HugeSlabs, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """Copy a weight float32 [out_features, in_features] into panels, which lie in the slabs."""
    panels = _pack(library, slabs, [weight])
    return PackedWeight(panels, None if bias is None else bias.detach().contiguous(), len(weight))


def pack_gated(
    library: ctypes.CDLL,
    slabs: HugeSlabs,
    gate: tuple[Tensor, Tensor | None],
    up: tuple[Tensor, Tensor | None],
    activation: Activation,
) -> PackedWeight:
    """Copy the weights of a gated pair, each float32 [width, in_features], into panels, which lie in the slabs."""
    assert takes_activation(activation)
    biases = [bias for _, bias in (gate, up) if bias is not None]
    assert len(biases) in (0, 2)
    joined = torch.cat(biases).detach() if biases else None
    return PackedWeight(_pack(library, slabs, [gate[0], up[0]]), joined, len(gate[0]), activation, is_gated=True)


def _pack(library: ctypes.CDLL, slabs: HugeSlabs, weights: list[Tensor]) -> Tensor:
    """Copy weights of one shape into panels, those of one after those of the other."""
    assert all(weight.dtype == torch.float32 for weight in weights)
    copied = [weight.detach().contiguous() for weight in weights]
    pointers = [ctypes.c_void_p(weight.data_ptr()) for weight in copied]
    is_narrow = all(library.cbatch_is_bfloat16(pointer, ctypes.c_int64(copied[0].numel())) for pointer in pointers)
    out_features, in_features = copied[0].shape
    panel = int(library.cbatch_linear_panel())
    shape = (len(weights), -(-out_features // panel), in_features, panel)
    panels = slabs.empty(shape, torch.bfloat16 if is_narrow else torch.float32)
    sizes = [ctypes.c_int64(out_features), ctypes.c_int64(in_features)]
    options = [ctypes.c_int64(is_narrow), ctypes.c_int64(torch.get_num_threads())]
    for pointer, of_weight in zip(pointers, panels, strict=True):
        library.cbatch_linear_pack(pointer, *sizes, ctypes.c_void_p(of_weight.data_ptr()), *options)
    return panels.flatten(0, 1)


def unpack(layer: PackedWeight) -> list[tuple[Tensor, Tensor | None]]:
    """Give weight float32 [out_features, in_features] and bias back: of one layer, or of a gated pair's two.

    A panel in bfloat16 has its halves' outputs in turns.
    """
    panels = layer.panels.float()
    if layer.panels.dtype == torch.bfloat16:
        panels = panels.view(*panels.shape[:2], -1, 2).transpose(2, 3).flatten(2)
    columns = panels.transpose(1, 2).flatten(0, 1)
    weights = columns.chunk(2) if layer.is_gated else (columns,)
    biases = (None,) * len(weights) if layer.bias is None else layer.bias.chunk(len(weights))
    return [(weight[: layer.out_features], bias) for weight, bias in zip(weights, biases, strict=True)]


def takes_packed(x: Tensor) -> bool:
    """Tell whether the product takes an input."""
    return x.dtype == torch.float32 and x.ndim == 2 and x.stride(1) == 1


def linear_packed(library: ctypes.CDLL, x: Tensor, layer: PackedWeight, residual: Tensor | None = None) -> Tensor:
    """Multiply, add the bias, activate and gate, add the residual: a new tensor."""
    assert takes_packed(x)
    assert x.shape[1] == layer.panels.shape[1]
    result = torch.empty(x.shape[0], layer.out_features)
    assert residual is None or (residual.shape == result.shape and residual.stride(1) == 1)
    arguments = _Arguments(
        x.data_ptr(),
        layer.panels.data_ptr(),
        None if layer.bias is None else layer.bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        result.data_ptr(),
        x.shape[0],
        x.shape[1],
        layer.out_features,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        result.stride(0),
        layer.is_gated,
        ACTIVATIONS[layer.activation],
        layer.panels.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    library.cbatch_linear(ctypes.byref(arguments))
    return result
