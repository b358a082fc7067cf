"""Whatever is planted into a run is what the diagnosis names first, and what it advises helps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cbatch.diagnose.findings import Finding
from cbatch.diagnose.rules import apply_rules
from cbatch.diagnose.subjects import of_run
from tests.diagnose.runs import LINEAR, Work, finished_run
from tests.simulate.traces import Clock


def works(count: int, prompts: tuple[int, int], outputs: tuple[int, int], shared: int = 0) -> list[Work]:
    rng = random.Random(0)
    return [(rng.randint(*prompts) + shared, shared, rng.randint(*outputs)) for _ in range(count)]


def findings(output: Path) -> list[Finding]:
    return list(apply_rules(of_run(output)[0]))


PLANTED: dict[str, dict[str, Any]] = {
    "request limit": {"works": works(120, (8, 30), (10, 40)), "max_requests_per_batch": 4, "max_batch_tokens": 256},
    "token budget": {"works": works(80, (200, 400), (4, 8)), "max_requests_per_batch": 32, "max_batch_tokens": 32},
    "memory": {
        "works": works(120, (60, 120), (20, 60)),
        "max_requests_per_batch": 32,
        "max_batch_tokens": 512,
        "num_blocks": 40,
    },
    "paging": {
        "works": works(120, (10, 30), (10, 40)),
        "max_requests_per_batch": 32,
        "max_batch_tokens": 512,
        "page_size": 512,
        "num_blocks": 8,
        "safety_margin": 0.0,
    },
    "continuous batching": {
        "works": works(160, (8, 16), (2, 120)),
        "mode": "static",
        "max_requests_per_batch": 16,
        "max_batch_tokens": 256,
    },
    "chunked prefill": {
        "works": [*works(60, (8, 16), (30, 60)), *works(12, (1500, 2000), (4, 8))] * 2,
        "mode": "continuous",
        "cost": LINEAR,
        "max_requests_per_batch": 16,
        "max_batch_tokens": 128,
        "num_blocks": 2048,
    },
    "input": {"works": works(60, (8, 30), (5, 10)), "every_s": 0.1, "max_batch_tokens": 256},
    "output": {"works": works(60, (8, 30), (5, 10)), "write_s": 0.05, "max_batch_tokens": 256, "cost": LINEAR},
}


def write_input(folder: Path, planted: list[Work]) -> str:
    """The rows of a job with these prompts."""
    path = folder / "in.jsonl"
    rows = ([1] * shared + [100 + n] * (prompt - shared) for n, (prompt, shared, _) in enumerate(planted))
    path.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in rows))
    return str(path)


@pytest.mark.parametrize("cause", PLANTED)
def test_what_is_planted_is_named_first(cause: str, tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED[cause])
    first, *_ = findings(finished_run(tmp_path, clock, settings.pop("works"), **settings))
    assert first.cause == cause
    assert first.gain is not None
    assert first.gain >= 0.03 or (first.itl_factor or 0) > 1.5


def test_prompts_that_begin_alike_are_named_where_sharing_is_off(tmp_path: Path, clock: Clock) -> None:
    planted = works(80, (8, 16), (4, 8), shared=160)
    report = {"inputs": [write_input(tmp_path, planted)]}
    settings: dict[str, Any] = {"max_batch_tokens": 256, "cost": LINEAR, "report": report}
    output = finished_run(tmp_path, clock, planted, allow_block_sharing=False, **settings)
    first, *_ = findings(output)
    assert first.cause == "prefix sharing"
    assert first.gain is not None
    assert "sharing is off" in first.evidence
    now = of_run(output)[0].facts.generate_s
    shared = of_run(finished_run(tmp_path, clock, planted, **settings))[0].facts.generate_s
    assert first.gain == pytest.approx(1 - shared / now, abs=0.1), "what was predicted is what it gains"
    assert "prefix sharing" not in {finding.cause for finding in findings(output)}


def test_a_few_long_requests_are_named_where_speculation_is_off(tmp_path: Path, clock: Clock) -> None:
    first, *rest = findings(finished_run(tmp_path, clock, works(6, (8, 16), (150, 200)), speculation=0))
    assert (first.cause, rest) == ("speculation", [])
    assert "half" in first.assumption


def test_drafts_that_are_wrong_are_named(tmp_path: Path, clock: Clock) -> None:
    """The runner takes no draft, and every request repeats itself, which makes drafts."""
    output = finished_run(tmp_path, clock, works(30, (8, 16), (30, 60)), speculation=64, cost=LINEAR)
    first, *_ = findings(output)
    assert first.cause == "speculation"
    assert "were wrong" in first.evidence


def test_what_is_advised_gains_what_was_predicted(tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED["request limit"])
    planted = settings.pop("works")
    before = finished_run(tmp_path, clock, planted, **settings)
    first, *_ = findings(before)
    assert first.gain is not None
    number = int(first.advice.removeprefix("--max-requests-per-batch "))
    took = of_run(before)[0].facts.generate_s
    after = finished_run(tmp_path, clock, planted, **settings | {"max_requests_per_batch": number})
    assert of_run(after)[0].facts.generate_s == pytest.approx((1 - first.gain) * took, rel=0.1)


def test_a_run_that_nothing_holds_back_is_told_so(tmp_path: Path, clock: Clock) -> None:
    output = finished_run(
        tmp_path, clock, works(60, (8, 30), (30, 40)), cost=LINEAR, max_requests_per_batch=64, max_batch_tokens=2048
    )
    assert findings(output) == []


@pytest.mark.parametrize("cause", ["request limit", "token budget", "memory", "paging", "input", "output"])
def test_a_run_without_a_trace_is_judged_by_its_report(cause: str, tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED[cause])
    output = finished_run(tmp_path, clock, settings.pop("works"), trace=False, **settings)
    first, *_ = findings(output)
    assert first.cause == cause
    assert (first.gain is None) == (cause != "output")
    assert first.gain is not None or "--trace" in first.assumption
