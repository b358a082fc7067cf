"""The numbers that the compiled kernels know, by the code that csrc/ has for each."""

from __future__ import annotations

import torch

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def element_name(dtype: torch.dtype) -> str:
    """Name a type as files and functions of csrc/ do, such as float32."""
    return str(dtype).removeprefix("torch.")
