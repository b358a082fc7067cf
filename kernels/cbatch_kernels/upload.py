"""Copies host arrays to a device. Called wherever a step's numbers become tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Give the array as a tensor on `device`, where that is the CPU with the same memory.

    For a GPU it is copied to pinned memory first: from there the copy joins the current stream's queue, where one from
    ordinary memory would wait for all that is in it.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
