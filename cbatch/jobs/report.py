"""`OUT.report.json`: what a job was, what it did and how fast. Called once the output is there.

Everything about rows and tokens is computed from the output's rows, over all sessions that they come from; steps and
settings are those of the last session that ran the model. Speed is output tokens over the seconds of generation only.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cbatch.config import EngineConfig, JobConfig
from cbatch.engine.stats import EngineStats
from cbatch.jobs.paths import TRACE_SUFFIX, JobPaths, errors_path
from cbatch.jobs.totals import Totals

PACKAGES = ("cbatch", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
PROMPT_SETTINGS = ("prompt_column", "template", "system_prompt")  # that say what of a row is the prompt
PROCESS_STATUS = Path("/proc/self/status")
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_RESTART_COUNT")


def row_figures(totals: Totals) -> dict[str, Any]:
    """Return the figures that the output's columns add up to."""
    generate_s = sum(totals.generate_s.values())
    asked = totals.targets.ttft_s is not None or totals.targets.itl_s is not None
    return {
        "rows": totals.rows,
        "rows_ok": totals.rows_ok,
        "rows_error": totals.rows_error,
        "errors": dict(totals.errors),
        "first_error": totals.first_error,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "computed_tokens": totals.computed_tokens,
        "recomputed_tokens": totals.recomputed_tokens,
        "output_tokens": totals.output_tokens,
        "preemptions": totals.preemptions,
        "rows_truncated": totals.rows_truncated,
        "truncated_tokens": totals.truncated_tokens,
        "rows_nulled": totals.rows_nulled,
        "columns_not_found": sorted(totals.columns_not_found),
        "generate_s": generate_s,
        "output_tokens_per_s": _per_second(totals.output_tokens, generate_s),
        "goodput_tokens_per_s": _per_second(totals.good_tokens, generate_s) if asked else None,
        "latency": totals.percentiles(),
    }


def engine_figures(stats: EngineStats) -> dict[str, Any]:
    """Return what the engine counted in this session."""
    return {
        "steps": stats.steps,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "offloads": stats.offloads,
        "restores": stats.restores,
        "soft_resets": stats.soft_resets,
        "out_of_memory_steps": stats.out_of_memory_steps,
        "mean_cache_usage": stats.mean_cache_usage,
        "max_cache_usage": stats.max_cache_usage,
        "kv_waste_fraction": stats.kv_waste_fraction,
        "schedule_s": stats.schedule_s,
        "idle_s": stats.idle_s,
        "starved_steps": stats.starved_steps,
        "series": stats.series.as_dict(),
    }


def environment() -> dict[str, Any]:
    """Return the versions of what ran, and what Slurm says of the job."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    slurm = {name: os.environ[name] for name in SLURM_VARIABLES if name in os.environ}
    return {"versions": versions, "host": platform.node(), "slurm": slurm}


def request_of(job: JobConfig, engine: EngineConfig) -> dict[str, Any]:
    """Return what was asked for, as given."""
    return {
        "inputs": list(job.inputs),
        "output": job.output,
        "model": engine.model,
        "sampling": dict(job.sampling),
        "prompt": {name: value for name in PROMPT_SETTINGS if (value := getattr(job, name)) is not None},
        "seeds": {"job": job.seed},
    }


def peak_rss_bytes() -> int:
    """Return the most memory that this program had resident."""
    try:
        lines = PROCESS_STATUS.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    except (OSError, StopIteration):  # elsewhere than on Linux, where getrusage counts what whoever started us had
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def read_report(path: Path) -> dict[str, Any]:
    """Return a report as written; {} where there is none that can be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def files_of_run(name: str) -> dict[str, str]:
    """Name everything that a run reads and writes, and what it is: nobody may write over it who only looks at it.

    `name` is its output, or the trace beside that.
    """
    output = Path(name.removesuffix(TRACE_SUFFIX))
    paths = JobPaths.of(str(output))
    inputs = read_report(paths.report).get("inputs")
    beside = {paths.report: "report", paths.journal: "journal", paths.trace: "trace", errors_path(output): "errors"}
    return {
        **{item: "the run's input" for item in (inputs if isinstance(inputs, list) else []) if isinstance(item, str)},
        **{str(path): f"the run's {what}" for path, what in beside.items()},
        str(output): "the run's output",
    }


def content_of(report: dict[str, Any]) -> object:
    """Return the hash of the output's content that a report names; None where it names none."""
    hashes = report.get("hashes")
    return hashes.get("content") if isinstance(hashes, dict) else None


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
