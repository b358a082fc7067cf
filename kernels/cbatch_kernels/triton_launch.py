"""How Triton kernels are launched, on a CUDA device or by Triton's interpreter on a CPU. Called by every `triton_*` op.

The interpreter is there to test the kernels without a device: `TRITON_INTERPRET=1`, set before the first import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED_PROCESSORS = 4  # so that work is split under the interpreter too

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def is_interpreted() -> bool:
    """Tell whether kernels run in Python, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def runs_on(device: torch.device) -> bool:
    """Tell whether kernels run on a device."""
    return device.type == "cuda" or (device.type == "cpu" and is_interpreted())


def launch(kernel: Any, grid: Sequence[int], *arguments: object, **constants: object) -> None:
    """Launch a kernel on the device of its first argument that is a tensor."""
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[tuple(grid)](*arguments, **constants)
    else:
        kernel[tuple(grid)](*arguments, **constants)


def count_processors(device: torch.device) -> int:
    """Count what runs programs side by side."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return INTERPRETED_PROCESSORS


def dot_dtype(dtype: torch.dtype) -> Any:
    """Give the type that products are made of: the tensors' own; the interpreter gets products of bfloat16 wrong."""
    return tl.float32 if is_interpreted() else _TYPES[dtype]
