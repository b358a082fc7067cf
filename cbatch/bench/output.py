"""The figures of a comparison as JSON: every run, the medians, and what was run on what. Called by the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch.bench.contest import Contest, Result
from cbatch.io.atomic import write_json
from cbatch.jobs.report import environment

KIND = "bench"


def as_json(results: Sequence[Result], contest: Contest, began: datetime) -> dict[str, Any]:
    """Spell a comparison."""
    workload = contest.workload
    return {
        "kind": KIND,
        "started_at": began.isoformat(timespec="seconds"),
        "model": contest.engine.model,
        "dtype": contest.dtype,
        "device": contest.device,
        "rows": len(workload.rows),
        "rows_left_out": workload.num_left_out,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "goodput_targets": asdict(contest.targets),
        "results": {result.contestant.name: result.as_dict() for result in results},
        **environment(),
    }


def write_results(name: str, results: Sequence[Result], contest: Contest, began: datetime) -> None:
    """Write the file; it appears complete. Raises OutputError."""
    write_json(Path(name), as_json(results, contest, began))
