"""What it takes for results not to depend on the batch, to the bit, and whether this machine can do it.

On a CPU a row of a matrix product does not depend on the other rows or on how many they are, so long as every thread
has a few: below about four, BLAS libraries switch to kernels that add in another order, unless the weights are packed.
So every product gets a whole number of `row_multiple` rows, padding included; attention adds in a fixed order
(cbatch_kernels). Everything else in a decoder works row by row. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cbatch_kernels.dispatch import AttentionChoice
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cbatch.compatibility import Facts, check
from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.models.inspect import ModelShape
from cbatch.models.load import LoadedModel
from cbatch.models.outline import ModelOutline
from cbatch.models.projections import PRODUCTS
from cbatch.units import MIB

ROWS_PER_THREAD = 8
HINT = "leave --deterministic out"
CHECKED = (1, 2, 3, 5, 8, 17)  # numbers of multiples whose products are compared
CHECKED_ROWS = (*CHECKED, 65, 200)  # where the multiple is 1
MAX_CHECKED_BYTES = 64 * MIB  # of a product: what is free is not shared out yet, and a head can be wide


def check_deterministic(shape: ModelShape, device: torch.device) -> None:
    """Refuse, before any weights load, what cannot be held. Raises UsageError."""
    check(Facts(deterministic=True, device=device.type, has_experts=shape.has_experts))


def decide_deterministic(config: EngineConfig, loaded: ModelOutline, attention: AttentionChoice) -> tuple[bool, str]:
    """Tell whether results do not depend on the batch, and why: asked for, or so in any case."""
    if config.deterministic is not None:
        return config.deterministic, "given"
    if not isinstance(loaded, LoadedModel):
        return False, "known once the weights are loaded"
    if loaded.device.type != "cpu" or loaded.shape.has_experts or attention.gathers or not _hold(loaded, rows=1):
        return False, "off by default where it costs speed"
    return True, "at no cost here: products and compiled attention give a row the same bits in any batch"


def row_multiple(loaded: LoadedModel) -> int:
    """Give the number of rows; UsageError where the model's products depend on their number all the same.

    Products over packed weights mostly hold for any number of rows: then it is 1, and nothing is padded.
    """
    for rows in (1, ROWS_PER_THREAD * loaded.num_threads):
        if _hold(loaded, rows):
            return rows
    raise UsageError(
        "deterministic cannot be held here: matrix products of this machine depend on the number of rows", hint=HINT
    )


def _hold(loaded: LoadedModel, rows: int) -> bool:
    """Tell whether all of the model's products give a row the same bits among any number of multiples of `rows`."""
    return all(_holds(product, rows) for product in _products(loaded.model))


@dataclass(frozen=True, slots=True)
class _Product:
    """One of the model's matrix products."""

    multiply: Callable[[Tensor], Tensor]
    out_features: int
    in_features: int
    dtype: torch.dtype


def _products(model: nn.Module) -> list[_Product]:
    """List the model's matrix products, one of each kind and shape."""
    found: dict[tuple[int, ...], _Product] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight
            assert isinstance(weight, Tensor)
            wide, deep = weight.T.shape if isinstance(module, Conv1D) else weight.shape
            found.setdefault((0, *weight.shape), _Product(module, wide, deep, weight.dtype))
        for part in vars(module).values():
            if isinstance(part, PRODUCTS):
                key = (1 + PRODUCTS.index(type(part)), *part.shape)
                found.setdefault(key, _Product(part, *part.shape, part.dtype))
    return list(found.values())


@torch.inference_mode()
def _holds(product: _Product, rows: int) -> bool:
    """Compare products of different numbers of rows, those left out that are too large."""
    most_rows = max(CHECKED[1] * rows, MAX_CHECKED_BYTES // (product.out_features * product.dtype.itemsize))
    counts = [count * rows for count in (CHECKED_ROWS if rows == 1 else CHECKED) if count * rows <= most_rows]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(counts[-1], product.in_features, generator=generator).to(product.dtype)
    most = product.multiply(inputs)
    return all(torch.equal(product.multiply(inputs[:count]), most[:count]) for count in counts[:-1])
