"""Finished runs with something planted that holds them back: the real engine over no model, on the test's clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cbatch.config import SamplingParams
from cbatch.engine.request import Prompt
from cbatch.jobs.report import engine_figures
from cbatch.jobs.trace import TraceWriter, describe_session
from cbatch.simulate.cost import CostModel
from tests.engine.unloaded import make_unloaded
from tests.simulate.traces import Clock, Costly

# Most of a step is overhead, so that larger batches are faster.
OVERHEAD = CostModel(per_step_s=20e-3, per_query_token_s=1e-5, per_kv_token_s=1e-8, per_request_s=1e-5)
# Every token costs the same however it is batched, so that only idling and waste are slow.
LINEAR = CostModel(per_step_s=1e-4, per_query_token_s=2e-4, per_kv_token_s=1e-8, per_request_s=1e-4)

Work = tuple[int, int, int]  # prompt tokens, of them shared, output tokens


def finished_run(
    folder: Path,
    clock: Clock,
    works: Iterable[Work],
    *,
    cost: CostModel = OVERHEAD,
    trace: bool = True,
    mode: str = "continuous+chunked",
    every_s: float = 0.0,
    write_s: float = 0.0,
    report: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Run works on the engine, one ready every `every_s` seconds, each taking `write_s` to write; return the output.

    `report` says what else the report says.
    """
    runner = Costly(clock, cost, noise=0.02)
    engine = runner.engine = make_unloaded(runner, mode=mode, **settings)
    output = folder / "out.jsonl"
    writer = TraceWriter(output.with_name("out.jsonl.trace.jsonl.gz"), {"session": 1, **describe_session(engine)})
    engine.observe(writer)

    def prompts() -> Iterator[Prompt | None]:
        for number, (prompt, shared, length) in enumerate(works):
            while clock.now < number * every_s:
                yield None
            token_ids = [1] * shared + [-1 - number] * (prompt - shared)
            yield Prompt(number, token_ids, SamplingParams(max_tokens=length, ignore_eos=True))

    waited = 0.0
    for outputs in engine.steps(prompts()):
        clock.sleep(write_s * len(outputs))
        waited += write_s * len(outputs)
    writer.close()
    if not trace:
        output.with_name("out.jsonl.trace.jsonl.gz").unlink()
    stats = engine.stats
    found = {
        **engine_figures(stats),
        "generate_s": stats.generate_s,
        "output_wait_s": waited,
        "preemptions": stats.preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "computed_tokens": stats.computed_tokens,
        "settings": {
            name: setting | ({"reason": "given"} if name in settings else {})
            for name, setting in engine.plan.settings().items()
        },
    } | (report or {})
    output.with_name("out.jsonl.report.json").write_text(json.dumps(found))
    output.write_text("")
    return output
