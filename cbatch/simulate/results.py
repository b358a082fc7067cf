"""The figures of a simulation as a JSON file. Called by `simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cbatch.io.atomic import write_json
from cbatch.simulate.comparison import Case, Comparison
from cbatch.simulate.figures import Figures
from cbatch.simulate.shards import ShardedPlan


def write_results(
    path: Path, comparison: Comparison, results: Sequence[tuple[Case, Figures]], plan: ShardedPlan | None
) -> None:
    """Write everything that was asked, assumed and found. Raises OutputError."""
    table: dict[str, Any] = {
        "source": comparison.calibration.source,
        "cost": asdict(comparison.calibration.cost),
        "engine": asdict(comparison.engine),
        "requests": len(comparison.workload),
        "measured_s": comparison.measured_s,
        "cases": [{"name": case.name, "mode": case.mode, **figures.as_dict()} for case, figures in results],
    }
    if plan is not None:
        table["shards"] = {
            "gpus": len(plan.shards),
            "load_s": plan.load_s,
            "duration_s": plan.duration_s,
            "gpu_hours": plan.gpu_hours,
            "output_tokens_per_s": plan.output_tokens_per_s,
            "generate_s": [shard.duration_s for shard in plan.shards],
        }
    write_json(path, table)
