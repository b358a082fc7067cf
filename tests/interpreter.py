"""Imports Triton so that its kernels run in its interpreter: decided by the environment, for good, at import.

Where there is a GPU they are compiled for it, as `tests/gpu` wants them, and what needs the interpreter is skipped.
"""

from __future__ import annotations

import contextlib
import os

import torch

IS_OFF = "there is a GPU, for which the kernels are compiled: tests/gpu runs them there"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401
        from cbatch_kernels import triton_attention, triton_rows, triton_sampling, triton_tuning  # noqa: F401
    del os.environ["TRITON_INTERPRET"]  # what asks for them, op by op
