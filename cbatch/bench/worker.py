"""Runs one workload in one mode of our engine, in a process of its own: python -m cbatch.bench.worker

Speaks as `peer_driver` does: a task on standard input, an outcome on standard output.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cbatch.bench import peer_driver
from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.modes import MODES
from cbatch.engine.request import Prompt
from cbatch.errors import CbatchError, EngineError
from cbatch.jobs.report import peak_rss_bytes


def run_task(task: peer_driver.Task) -> dict[str, Any]:
    """Load, warm up, run, and tell how it went. Raises CbatchError."""
    engine = Engine.load(EngineConfig(**task["engine"]), MODES[task["mode"]])
    with contextlib.suppress(EngineError):  # the rows will say it
        run_rows(engine, peer_driver.warm_up_rows(engine.tokenizer.vocab_size, task["longest"]))
    before = replace(engine.stats)
    times = run_rows(engine, [(ids, count) for ids, count in task["rows"]])
    return {
        "token_times": times,
        "load_s": engine.load_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_device_bytes": peer_driver.peak_device_bytes(),
        "version": "",
        "settings": {name: setting["value"] for name, setting in engine.plan.settings().items()},
        "cached_tokens": engine.stats.cached_tokens - before.cached_tokens,
        "steps": engine.stats.steps - before.steps,
    }


def run_rows(engine: Engine, rows: Sequence[tuple[list[int], int]]) -> list[list[float]]:
    """Run rows greedily to exactly so many tokens each; give when each token came, in seconds from the start."""
    prompts = [Prompt(i, ids, SamplingParams(max_tokens=count, ignore_eos=True)) for i, (ids, count) in enumerate(rows)]
    times: list[list[float]] = [[] for _ in rows]
    start = time.perf_counter()
    for output in engine.generate(prompts):
        if output.error is not None:
            raise EngineError(f"row {output.request_id}: {output.error}")
        assert output.metrics.token_times is not None
        times[output.request_id] = [at - start for at in output.metrics.token_times]
    return times


def main() -> None:
    """Do what standard input says."""
    stream = peer_driver.claim_stdout()
    task = peer_driver.read_task()
    try:
        outcome = run_task(task)
    except CbatchError as error:
        outcome = {"error": str(error)}
    peer_driver.answer(stream, outcome)
    os._exit(0)  # as the peers do


if __name__ == "__main__":
    main()
