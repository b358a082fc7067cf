"""The products of a fused decoder, as they run on its device: a linear layer, with what follows it, and a gated pair.

Built by cbatch/models/patch.py, called by cbatch/models/fused.py. On a CPU weights are packed, for products of our own
in float32 and for oneDNN's else, which take activation, gate and residual along; on a GPU they stay as PyTorch has
them, and a gated pair is one product whose halves are combined by one kernel. Leaves out which layers there are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Protocol

import torch
from cbatch_kernels import dispatch
from cbatch_kernels.compile import load_kernels
from cbatch_kernels.huge_pages import HugeSlabs
from cbatch_kernels.linear import Activation, LinearWeight, linear, linear_combine, pack_linear, refuses_packing
from cbatch_kernels.packed_linear import PackedWeight, linear_packed, pack_gated, pack_weight, takes_activation
from torch import Tensor
from torch.nn import functional

Parameters = tuple[Tensor, Tensor | None]  # weight [out_features, in_features] and bias


class Product(Protocol):
    """A matrix product over some of a model's weights."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @property
    def dtype(self) -> torch.dtype:
        """What it multiplies."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [..., inputs]: [..., outputs]; of a gated pair, activation(gate(x)) * up(x)."""


class Projection(Product, Protocol):
    """One linear layer."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Multiply and add the residual, which may be written over."""


class Projections(Protocol):
    """Makes the products of a model."""

    @property
    def takes_all(self) -> bool:
        """Whether linear layers that stand alone are made by it as well."""

    def project(self, layer: Parameters) -> Projection:
        """Make a linear layer."""

    def gate(self, gate: Parameters, up: Parameters, activation: Activation) -> Product:
        """Make a gated pair."""


def choose_projections(dtype: torch.dtype, device: torch.device) -> Projections | str:
    """Choose what a model's products run on, or say why its modules are left as they are."""
    if dispatch.uses_triton(device):
        return PlainProjections()
    if device.type == "cpu" and dtype == torch.float32 and (library := load_kernels(dtype).library) is not None:
        return CompiledProjections(library)
    return refuses_packing(dtype, device) or OneDnnProjections()


@dataclass(frozen=True, slots=True)
class CompiledProduct:
    """A linear layer or a gated pair over our own products."""

    library: ctypes.CDLL
    layer: PackedWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.layer.out_features, self.layer.panels.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        return linear_packed(self.library, x.reshape(-1, x.shape[-1]), self.layer).view(*x.shape[:-1], -1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        rows, beside = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
        return linear_packed(self.library, rows, self.layer, beside).view(residual.shape)


@dataclass(frozen=True, slots=True)
class MergedGate:
    """A gated pair in one product, and its halves combined after it."""

    both: Projection
    activation: Activation

    @property
    def shape(self) -> tuple[int, int]:
        return self.both.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.both.dtype

    def __call__(self, x: Tensor) -> Tensor:
        product = self.both(x)
        gated = dispatch.activate_and_multiply(product.view(-1, product.shape[-1]), self.activation)
        return gated.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class CompiledProjections:
    """For CPUs with a compiler, in float32."""

    library: ctypes.CDLL
    slabs: HugeSlabs = field(default_factory=HugeSlabs)  # of all weights of the model
    takes_all: bool = True

    def project(self, layer: Parameters) -> Projection:
        return CompiledProduct(self.library, pack_weight(self.library, self.slabs, *layer))

    def gate(self, gate: Parameters, up: Parameters, activation: Activation) -> Product:
        if not takes_activation(activation):
            return MergedGate(self.project(_joined(gate, up)), activation)
        return CompiledProduct(self.library, pack_gated(self.library, self.slabs, gate, up, activation))


@dataclass(frozen=True, slots=True)
class OneDnnProjection:
    """A linear layer over a weight that oneDNN has packed."""

    layer: LinearWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.layer.weight.shape[0], self.layer.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.layer)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return linear_combine(x, self.layer, residual, "add")


@dataclass(frozen=True, slots=True)
class OneDnnGate:
    """A gated pair over packed weights; the second product takes the first as its factor."""

    first: LinearWeight
    second: LinearWeight
    activation: Activation

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.weight.shape[0], self.first.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return linear_combine(x, self.second, linear(x, self.first, self.activation), "mul")


@dataclass(frozen=True, slots=True)
class OneDnnProjections:
    """For CPUs whose oneDNN packs."""

    takes_all: bool = True

    def project(self, layer: Parameters) -> Projection:
        return OneDnnProjection(pack_linear(*layer))

    def gate(self, gate: Parameters, up: Parameters, activation: Activation) -> Product:
        return OneDnnGate(pack_linear(*gate), pack_linear(*up), activation)


@dataclass(frozen=True, slots=True)
class PlainProjection:
    """A linear layer over a weight as PyTorch has it."""

    weight: Tensor
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.bias is not None:
            return residual.add_(functional.linear(x, self.weight, self.bias))
        rows = residual.view(-1, residual.shape[-1])  # the product adds up where the residual lies
        return rows.addmm_(x.reshape(-1, x.shape[-1]), self.weight.t()).view(residual.shape)


@dataclass(frozen=True, slots=True)
class PlainProjections:
    """For devices whose library for products needs no packing."""

    takes_all: bool = False

    def project(self, layer: Parameters) -> Projection:
        weight, bias = layer
        return PlainProjection(weight.detach(), None if bias is None else bias.detach())

    def gate(self, gate: Parameters, up: Parameters, activation: Activation) -> Product:
        return MergedGate(self.project(_joined(gate, up)), activation)


PRODUCTS = (CompiledProduct, MergedGate, OneDnnProjection, OneDnnGate, PlainProjection)


def _joined(gate: Parameters, up: Parameters) -> Parameters:
    (weight, bias), (other_weight, other_bias) = gate, up
    assert (bias is None) == (other_bias is None)
    joined = None if bias is None or other_bias is None else torch.cat((bias, other_bias))
    return torch.cat((weight, other_weight)), joined
