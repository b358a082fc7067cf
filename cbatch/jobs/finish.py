"""The last phase of a run: output, report and what is said of both. Called by `run` once every row has its entry."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.engine.stats import EngineStats
from cbatch.errors import UsageError
from cbatch.io.atomic import write_json
from cbatch.jobs import report as reporting
from cbatch.jobs.assemble import Layout, Tick, assemble, columns_digest, content_digest
from cbatch.jobs.checkpoint import CLOCK
from cbatch.jobs.journal import Journal
from cbatch.jobs.paths import errors_path
from cbatch.jobs.rowindex import RowIndex
from cbatch.jobs.setup import JobSetup
from cbatch.jobs.shards import Part, mark_success
from cbatch.jobs.totals import Targets, Totals

# What a session wrote down, as it is reported.
FACTS = ("settings", "generation_config", CLOCK, "versions", "host", "slurm")


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """What this process did."""

    number: int
    num_rows: int
    num_replayed: int
    began: float  # monotonic seconds
    started_at: str
    load_s: float
    stats: EngineStats
    ran_engine: bool
    output_wait_s: float
    facts: dict[str, Any]  # of the last session that ran the model, this one or an earlier


def finish(
    setup: JobSetup,
    journal: Journal,
    index: RowIndex,
    layout: Layout,
    rows_digest: str,
    session: SessionFigures,
    part: Part | None,
    tick: Tick,
) -> tuple[bool, dict[str, Any]]:
    """Put output and report together unless they are there already. Returns whether there was anything to do, and the
    report. Raises OutputError, UsageError for a finished output that is not as it was left, and what `tick` raises.
    """
    job, paths = setup.job, setup.paths
    digest = content_digest(layout, index, rows_digest)
    earlier = reporting.read_report(paths.report)
    is_there = paths.output.exists() and (not earlier.get("errors_file") or errors_path(paths.output).exists())
    is_new = not is_there or reporting.content_of(earlier) != digest
    if is_new:
        totals = Totals(len(index), Targets(job.goodput_ttft, job.goodput_itl))
        assemble(journal, index, layout, totals, tick)
        if session.ran_engine:
            totals.generate_s[session.number] = session.stats.generate_s
        hashes = {
            "model": setup.model_identity.hex(),
            "rows": rows_digest,
            "columns": columns_digest(layout),
            "content": digest,
        }
        column = None if layout.openai else layout.names["row"]
        failures = errors_path(paths.output).name if layout.openai and totals.rows_error else None
        earlier = _report(setup, totals, session, part) | {
            "row_column": column,
            "hashes": hashes,
            "errors_file": failures,
            "output_bytes": paths.output.stat().st_size,
        }
        write_json(paths.report, earlier)
    else:
        _check_untouched(paths.output, earlier)
        if part is not None and earlier.get("shard") != part.as_dict():  # other shards have other rows now
            earlier["shard"] = part.as_dict()
            write_json(paths.report, earlier)
    if part is not None:
        mark_success(Path(setup.job.output), part.shard.count)
    return is_new, earlier


def _check_untouched(output: Path, report: dict[str, Any]) -> None:
    """Refuse to call an output finished that was cut, or edited; what was edited is not overwritten unasked either."""
    num_bytes, expected = output.stat().st_size, report.get("output_bytes")
    if expected is not None and num_bytes != expected:
        raise UsageError(
            f"{output} is not as this job left it: {num_bytes} bytes instead of {expected}",
            hint="move it away and run the same command again, which puts it together from the journal",
        )


def _report(setup: JobSetup, totals: Totals, session: SessionFigures, part: Part | None) -> dict[str, Any]:
    report = {
        **reporting.row_figures(totals),
        **reporting.engine_figures(session.stats),
        "output_wait_s": session.output_wait_s,
        "trace": setup.paths.trace.name if setup.paths.trace.exists() else None,
        "load_s": session.load_s,
        "wall_s": time.monotonic() - session.began,
        "started_at": session.started_at,
        "peak_rss_bytes": reporting.peak_rss_bytes(),
        **reporting.request_of(setup.job, setup.engine),
        "session": {
            "number": session.number,
            "rows": session.num_rows - session.num_replayed,
            "rows_replayed": session.num_replayed,
            "output_tokens": totals.output_tokens_of[session.number],
            "generate_s": session.stats.generate_s,
        },
        **{name: session.facts.get(name, {}) for name in FACTS},
    }
    if part is not None:
        report["shard"] = part.as_dict()
    return report
