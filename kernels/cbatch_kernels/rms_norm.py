"""RMS norm: scales every row to unit root mean square, times a weight, and adds a residual where there is one.

    x         [T, hidden], or [T, R, hidden] for R rows a token; the last dimension dense
    weight    float32 [hidden]
    residual  as x, [T, hidden] and dense

Computed in float32, rounded once. Called by the fused modules of cbatch/models/fused.py, through `dispatch`.
Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cbatch_kernels.elements import ELEMENTS


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise rows: a new dense tensor of x's shape and dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = scaled * weight
    return (normed if residual is None else residual + normed).to(x.dtype)


class _Arguments(ctypes.Structure):  # as in csrc/rms_norm.h; strides count elements
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("rows_per_token", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("result_token_stride", ctypes.c_int64),
        ("result_row_stride", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


def takes_compiled_rms_norm(x: Tensor) -> bool:
    """Tell whether the kernel takes a tensor: rows in one piece on the CPU."""
    return x.device.type == "cpu" and x.dtype in ELEMENTS and x.stride(-1) == 1 and x.ndim in (2, 3)


def takes_residual(x: Tensor, residual: Tensor | None) -> bool:
    """Tell whether the kernels take a residual, which lies as their result will."""
    return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous())


def rms_norm_compiled(
    library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Normalise rows; as the reference. What a row gets does not depend on the others, to the bit."""
    assert weight.dtype == torch.float32
    assert weight.is_contiguous()
    assert weight.shape == x.shape[-1:]
    assert takes_residual(x, residual)
    result = torch.empty(x.shape, dtype=x.dtype)
    rows_per_token = x.shape[1] if x.ndim == 3 else 1
    arguments = _Arguments(
        x.data_ptr(),
        result.data_ptr(),
        weight.data_ptr(),
        None if residual is None else residual.data_ptr(),
        x.shape[0] * rows_per_token,
        rows_per_token,
        x.stride(0),
        x.stride(1) if x.ndim == 3 else 0,
        result.stride(0),
        result.stride(1) if x.ndim == 3 else 0,
        x.shape[-1],
        ELEMENTS[x.dtype],
        torch.get_num_threads(),
        eps,
    )
    library.cbatch_rms_norm(ctypes.byref(arguments))
    return result
