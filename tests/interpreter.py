"""Imports Triton so that its kernels can run in its interpreter: decided by the environment, for good, at import."""

from __future__ import annotations

import contextlib
import os

os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):
    import triton.language  # noqa: F401
    from cbatch_kernels import triton_attention, triton_rows  # noqa: F401
del os.environ["TRITON_INTERPRET"]  # what asks for them, op by op
