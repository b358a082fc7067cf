"""Drawing tokens in Triton: `draw_tokens_ref` for CUDA devices, and for CPUs under Triton's interpreter.

One launch for all rows, greedy ones too. Shapes as in `draw_tokens`. Called by `dispatch`. Leaves out which
implementation runs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cbatch_kernels.draw_tokens import DrawRules
from cbatch_kernels.triton_kernels.sampling import draw_tokens
from cbatch_kernels.triton_launch import launch
from cbatch_kernels.triton_tiles import ANY_WIDTH, row_choice
from cbatch_kernels.tuned_choices import Values
from cbatch_kernels.upload import to_device

LEAST_TEMPERATURE = np.finfo(np.float32).tiny  # what is smaller may be taken for 0 on a device


def draw_tokens_triton(logits: Tensor, rules: DrawRules, block: Values | None = None) -> Tensor:
    """Draw a token per row; as the reference, but for what is within rounding. `block` is as in `row_choice`."""
    assert logits.stride(1) == 1
    assert len(rules) == len(logits) > 0
    is_drawn = rules.temperature > 0
    temperature = np.where(is_drawn, np.maximum(rules.temperature, LEAST_TEMPERATURE), 0)
    packed = np.stack((temperature, rules.top_p, rules.top_k, rules.min_p, rules.uniform), dtype=np.float64)
    num_logits, num_warps = block or row_choice("draw_tokens", logits.device, logits.dtype, ANY_WIDTH)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    launch(
        draw_tokens,
        (len(logits),),
        logits,
        to_device(packed, logits.device),
        tokens,
        logits.stride(0),
        logits.shape[1],
        BLOCK=num_logits,
        num_warps=num_warps,
    )
    return tokens
