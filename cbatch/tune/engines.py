"""The model, loaded once, and engines built over it, one at a time. The only module of tune that imports torch.

Called by `run`; a test or a simulation brings its own with the methods of `EngineSource`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import replace

import psutil
import torch

from cbatch.config import EngineConfig
from cbatch.engine.engine import Engine, plan_over
from cbatch.engine.plan import EnginePlan, check_config
from cbatch.models.inspect import inspect_model
from cbatch.models.load import load_model
from cbatch.models.memory import is_out_of_memory
from cbatch.models.tokenizer import Tokenizer
from cbatch.tune.space import Value


class LoadedEngines:
    """Plans and builds engines around one loaded model, the configuration as given but for some settings."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. Raises UsageError, before any weights load where possible."""
        shape = inspect_model(config)
        check_config(config, shape)
        self._config = config
        self._loaded = load_model(config, shape)
        self._process = psutil.Process()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def generation_defaults(self) -> dict[str, object]:
        return self._loaded.generation_defaults

    def plan(self, settings: Mapping[str, Value]) -> EnginePlan:
        """Decide the plan with these settings; no engine may be in memory. Raises UsageError."""
        return plan_over(self._loaded, self._with(settings))

    def build(self, settings: Mapping[str, Value]) -> Engine:
        """Build an engine with these settings; the one before must have been let go of. Raises UsageError."""
        self.release()
        if self._loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._loaded.device)
        return Engine.over(self._loaded, self._with(settings))

    def release(self) -> None:
        """Give back the memory of engines that were let go of: their parts refer to one another."""
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use

    def used_bytes(self) -> int:
        """Count the memory in use now; on a GPU the most since the engine was built."""
        if self._loaded.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._loaded.device)
        return int(self._process.memory_info().rss)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an engine failed for want of memory."""
        return is_out_of_memory(error)

    def _with(self, settings: Mapping[str, Value]) -> EngineConfig:
        changes: dict[str, object] = dict(settings)
        return replace(self._config, **changes)  # type: ignore[arg-type]
