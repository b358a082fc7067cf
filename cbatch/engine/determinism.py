"""What it takes for results not to depend on the batch, to the bit, and whether this machine can do it.

On a CPU a row of a matrix product does not depend on the other rows or on how many they are, so long as every thread
has a few: below about four, BLAS libraries switch to kernels that add in another order. So every product gets a whole
number of `row_multiple` rows, padding included; attention adds in a fixed order (cbatch_kernels). Everything else in a
decoder works row by row. Called by the engine where `deterministic` is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cbatch.errors import UsageError
from cbatch.models.inspect import ModelShape
from cbatch.models.load import LoadedModel

ROWS_PER_THREAD = 8
HINT = "leave --deterministic out"
CHECKED = (1, 2, 3, 8)  # numbers of multiples whose products are compared


def check_deterministic(shape: ModelShape, device: torch.device) -> None:
    """Refuse, before any weights load, what cannot be held. Raises UsageError."""
    if device.type != "cpu":
        raise UsageError(f"deterministic works on the CPU only, and the device is {device.type}", hint="--device cpu")
    if shape.has_experts:
        raise UsageError(
            "deterministic cannot be held for a mixture of experts: how many rows an expert gets depends on the batch",
            hint=HINT,
        )


def row_multiple(loaded: LoadedModel) -> int:
    """Give the number of rows; UsageError where the model's products depend on their number all the same."""
    rows = ROWS_PER_THREAD * loaded.num_threads
    seen = set()
    for module in loaded.model.modules():
        if not isinstance(module, nn.Linear | Conv1D) or tuple(module.weight.shape) in seen:
            continue
        seen.add(tuple(module.weight.shape))
        if not _holds(module, rows):
            raise UsageError(
                "deterministic cannot be held here: matrix products of this machine depend on the number of rows",
                hint=HINT,
            )
    return rows


@torch.inference_mode()
def _holds(module: nn.Module, rows: int) -> bool:
    """Compare products of different numbers of rows."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    num_inputs = weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(CHECKED) * rows, num_inputs, generator=generator).to(weight.dtype)
    most = module(inputs)
    return all(torch.equal(module(inputs[: count * rows]), most[: count * rows]) for count in CHECKED)
