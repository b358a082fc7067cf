"""cbatch: offline batch inference with language models. The command line is `cbatch.cli`; this is the Python API.

Names are imported when they are first used, so that `import cbatch` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch.config import EngineConfig, JobConfig, SamplingParams
    from cbatch.engine.engine import Engine
    from cbatch.engine.request import Prompt, RequestOutput
    from cbatch.jobs.run import JobSummary, run_job

_HOMES = {
    "Engine": "cbatch.engine.engine",
    "EngineConfig": "cbatch.config",
    "JobConfig": "cbatch.config",
    "JobSummary": "cbatch.jobs.run",
    "Prompt": "cbatch.engine.request",
    "RequestOutput": "cbatch.engine.request",
    "SamplingParams": "cbatch.config",
    "run_job": "cbatch.jobs.run",
}

__all__ = ["Engine", "EngineConfig", "JobConfig", "JobSummary", "Prompt", "RequestOutput", "SamplingParams", "run_job"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cbatch' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
