"""Imports transformers without what cbatch never uses of it: torch's compiler and its distributed tensors.

Called before an engine is loaded for a job. Importing the two takes a quarter of what importing torch and transformers
takes; transformers only marks functions for `torch.compile` with the one, and looks for sharded weights with the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import transformers.utils

logger = logging.getLogger(__name__)

COMPILER = "torch._dynamo"
FREE_STANDING = f"{COMPILER}._trace_wrapped_higher_order_op"  # needs nothing of the package that it lies in
MODELING = "transformers.modeling_utils"


def import_modeling() -> None:
    """Import transformers' modeling code, and let `torch._dynamo` wait until somebody uses more of it than its marks.

    Changes `sys.modules`, and what transformers knows of this process: that it has no torch.distributed. Does nothing
    where either is imported already.
    """
    if COMPILER in sys.modules or MODELING in sys.modules:
        return
    _defer_compiler()
    # transformers asks once and keeps the answer; nothing but its losses wants scipy
    with _absent(torch.distributed, "is_available"), _absent(transformers.utils, "is_scipy_available"):
        importlib.import_module(MODELING)


@contextmanager
def _absent(module: ModuleType, question: str) -> Iterator[None]:
    """Have a module's question whether something is there answered with no."""
    known = getattr(module, question)
    setattr(module, question, lambda: False)
    try:
        yield
    finally:
        setattr(module, question, known)


class _Marks(ModuleType):
    """Stands for `torch._dynamo` and marks nothing, for nothing is compiled; any other name loads the real module."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(COMPILER), name)


def _defer_compiler() -> None:
    spec = importlib.util.find_spec(COMPILER)
    assert spec is not None
    marks = _Marks(COMPILER)
    marks.__dict__.update(disable=_unmarked, allow_in_graph=_unmarked, assume_constant_result=_unmarked)
    marks.__dict__.update(__spec__=spec, __file__=spec.origin, __path__=spec.submodule_search_locations)
    sys.modules[COMPILER] = marks
    try:
        importlib.import_module(FREE_STANDING)
    except ImportError as error:  # a version that is built otherwise: then the whole is imported, as ever
        logger.debug("torch's compiler is imported with transformers: %s", error)
        if sys.modules.get(COMPILER) is marks:
            del sys.modules[COMPILER]
    del marks.__path__  # so that any other part loads the whole


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function, or a decorator that does, as `torch._dynamo.disable` can be used both ways."""
    return _unmarked if function is None else function
