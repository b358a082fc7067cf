"""Runs that are not plain: resumed, merged, scored, with a scheduler that holds requests back, with little to see."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.diagnose.diagnosis import diagnose_run
from cbatch.diagnose.findings import Diagnosis
from cbatch.diagnose.subjects import of_run
from cbatch.engine.modes import CHUNKED, STATIC
from cbatch.errors import InputError
from cbatch.simulate.cost import CostModel
from tests.diagnose.runs import LINEAR, Work, finished_run
from tests.diagnose.test_planted import PLANTED, works, write_input
from tests.simulate.traces import Clock

ROOMY: dict[str, Any] = {"cost": LINEAR, "max_requests_per_batch": 64, "max_batch_tokens": 2048}


def causes(diagnosis: Diagnosis) -> set[str]:
    return {finding.cause for finding in diagnosis.findings}


def change_report(output: Path, **values: Any) -> dict[str, Any]:
    path = output.with_name("out.jsonl.report.json")
    report: dict[str, Any] = json.loads(path.read_text()) | values
    path.write_text(json.dumps(report))
    return report


def change_trace(output: Path, change: Any) -> None:
    """Let `change` edit every line of a trace in place."""
    path = output.with_name("out.jsonl.trace.jsonl.gz")
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    for line in lines:
        change(line)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def generate_nothing(line: dict[str, Any]) -> None:
    for event in line.get("events", ()):
        event[5] = 0


def resumed(folder: Path, clock: Clock, first: list[Work], second: list[Work], **settings: Any) -> Path:
    """A job of two sessions; what their engines have counted is the second one's, what rows add up to is the job's."""
    output = finished_run(folder, clock, first, **{"cost": LINEAR, **settings, "every_s": 0.0})
    earlier = json.loads(output.with_name("out.jsonl.report.json").read_text())["generate_s"]
    began = clock.now
    clock.now = 0.0
    finished_run(folder, clock, second, **{"cost": LINEAR, **settings})
    clock.now += began
    own = json.loads(output.with_name("out.jsonl.report.json").read_text())["generate_s"]
    change_report(output, generate_s=earlier + own, session={"number": 2, "generate_s": own})
    return output


def test_prompts_that_are_only_scored_are_diagnosed(tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED["token budget"])
    output = finished_run(tmp_path, clock, settings.pop("works"), **settings)
    change_trace(output, generate_nothing)
    found = diagnose_run(str(output))
    assert any("nothing was generated" in note for note in found.notes)
    assert found.findings[0].cause == "token budget"
    assert "scores is not simulated" in found.findings[0].assumption


def test_rows_that_only_score_are_not_taken_for_waiting(tmp_path: Path, clock: Clock) -> None:
    """Their time is in the run and not in the simulation, which is no sign of an input that is slow."""
    output = finished_run(tmp_path, clock, works(60, (80, 90), (4, 6)), **ROOMY | {"every_s": 0.018})

    def score(line: dict[str, Any]) -> None:
        for event in line.get("events", ()):
            event[5] = 0 if event[0] % 4 else event[5]

    idle = of_run(output)[0].facts
    change_trace(output, score)
    change_report(output, rows_ok=60, latency={"ttft_s": {"count": 15}})
    found = diagnose_run(str(output))
    assert any("45 rows generated nothing" in note for note in found.notes)
    gains = [finding.gain or 0.0 for finding in found.findings if finding.cause == "input"]
    assert all(gain == pytest.approx(idle.idle_s / idle.generate_s) for gain in gains)


def test_a_trace_without_a_step_leaves_the_report(tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED["request limit"])
    output = finished_run(tmp_path, clock, settings.pop("works"), **settings)
    output.with_name("out.jsonl.trace.jsonl.gz").write_bytes(gzip.compress(b""))
    found = diagnose_run(str(output))
    assert any("the trace is left out" in note and "holds no step" in note for note in found.notes)
    assert found.findings[0].cause == "request limit"


def test_what_was_not_seen_is_said(tmp_path: Path, clock: Clock) -> None:
    output = finished_run(tmp_path, clock, works(60, (8, 30), (30, 40)), trace=False, **ROOMY)
    assert diagnose_run(str(output)).verdict == "nothing holds it back that a setting would help"
    change_report(output, series={})
    found = diagnose_run(str(output))
    assert found.findings == ()
    assert "it was not seen how it was batched" in found.verdict


def test_a_merged_job_is_told_to_look_at_its_parts(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.report.json").write_text(json.dumps({"parts": [{}], "rows": 3}))
    with pytest.raises(InputError, match=r"is merged.*name a part"):
        diagnose_run(str(tmp_path / "out.jsonl"))


def test_shares_of_a_resumed_job_are_of_the_session_they_were_counted_in(
    tmp_path: Path,
    clock: Clock,
) -> None:
    output = resumed(tmp_path, clock, works(400, (80, 90), (5, 10)), works(60, (8, 30), (5, 10)), every_s=0.1)
    found = diagnose_run(str(output))
    first = found.findings[0]
    assert first.cause == "input"
    facts = of_run(output)[0].facts
    assert first.gain == pytest.approx(facts.idle_s / facts.generate_s)
    assert (
        facts.generate_s == json.loads(output.with_name("out.jsonl.report.json").read_text())["session"]["generate_s"]
    )
    assert any("of its last session" in note for note in found.notes)


def test_time_that_no_trace_shows_is_not_taken_for_waiting(tmp_path: Path, clock: Clock) -> None:
    """The trace is of the second session only; the job took ten times as long."""
    output = finished_run(tmp_path, clock, works(60, (80, 90), (4, 6)), **ROOMY | {"every_s": 0.018})
    own = json.loads(output.with_name("out.jsonl.report.json").read_text())["generate_s"]
    before = diagnose_run(str(output))
    change_report(output, generate_s=10 * own, session={"number": 2, "generate_s": own})
    after = diagnose_run(str(output))
    assert [(f.cause, f.gain) for f in after.findings] == [(f.cause, f.gain) for f in before.findings]


def test_a_resumed_job_without_a_trace_is_judged_by_its_last_session(tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED["request limit"])
    output = finished_run(tmp_path, clock, settings.pop("works"), trace=False, **settings)
    own = json.loads(output.with_name("out.jsonl.report.json").read_text())["generate_s"]
    change_report(output, generate_s=100 * own, session={"number": 2, "generate_s": own})
    assert diagnose_run(str(output)).findings[0].cause == "request limit"


def test_sessions_with_other_settings_are_left_out(tmp_path: Path, clock: Clock) -> None:
    settings: dict[str, Any] = {"max_requests_per_batch": 64, "max_batch_tokens": 256}
    output = finished_run(tmp_path, clock, works(60, (8, 30), (10, 40)), **settings)
    finished_run(tmp_path, clock, works(120, (8, 30), (10, 40)), **settings | {"max_requests_per_batch": 4})
    found = diagnose_run(str(output))
    assert "1 of the 2 sessions had other settings, and are left out" in found.notes
    assert found.findings[0].cause == "request limit"
    assert "for 9" in found.findings[0].evidence, "nearly all of the time of that session"


def test_a_scheduler_that_keeps_room_is_not_taken_for_a_batch_that_waits(tmp_path: Path, clock: Clock) -> None:
    output = finished_run(
        tmp_path, clock, works(120, (10, 20), (200, 300)), scheduler_type="offline", num_blocks=100,
        max_requests_per_batch=32, max_batch_tokens=512,
    )  # fmt: skip
    situation, words = of_run(output)
    assert (situation.mode, "static" in words) == (CHUNKED, False)
    found = diagnose_run(str(output))
    assert found.findings[0].cause == "memory"
    assert "offline scheduler keeps room" in found.findings[0].evidence
    assert "continuous batching" not in causes(found)


def test_pages_read_once_for_each_request_are_not_taken_for_a_batch_that_waits(tmp_path: Path, clock: Clock) -> None:
    """All requests share most of what they read, so that the cache is mostly empty and a step can read no more."""
    output = finished_run(
        tmp_path, clock, works(80, (8, 12), (40, 60), shared=480), num_blocks=128,
        max_requests_per_batch=32, max_batch_tokens=512,
    )  # fmt: skip
    situation, _ = of_run(output)
    assert situation.mode == CHUNKED
    assert situation.observed is not None
    assert (situation.observed.unfilled, situation.observed.short_of_cache > 0.5) == (0.0, True)
    found = diagnose_run(str(output))
    assert found.findings[0].cause == "memory"
    assert "a shared page is read once for each" in found.findings[0].evidence


def test_the_mode_is_what_the_trace_says(tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED["continuous batching"])
    output = finished_run(tmp_path, clock, settings.pop("works"), **settings)
    situation, words = of_run(output)
    assert (situation.mode, "batched static" in words) == (STATIC, True)


def test_sharing_that_the_model_does_not_allow_is_no_advice(tmp_path: Path, clock: Clock) -> None:
    planted = works(80, (8, 16), (4, 8), shared=160)
    report = {"inputs": [write_input(tmp_path, planted)]}
    output = finished_run(
        tmp_path, clock, planted, cost=LINEAR, max_batch_tokens=256, allow_block_sharing=False, report=report
    )
    assert "prefix sharing" in causes(diagnose_run(str(output)))
    settings = json.loads(output.with_name("out.jsonl.report.json").read_text())["settings"]
    settings["allow_block_sharing"]["reason"] = "off: the model's sliding-window layers keep no block"
    change_report(output, settings=settings)
    assert "prefix sharing" not in causes(diagnose_run(str(output)))


def test_what_a_run_made_its_prompts_of_is_what_is_compared(tmp_path: Path, clock: Clock) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "x" * 640, "text": f"{n} differs"}) + "\n" for n in range(10)))
    report: dict[str, Any] = {"inputs": [str(rows)]}
    output = finished_run(tmp_path, clock, works(30, (8, 16), (4, 8)), allow_block_sharing=False, report=report)
    assert of_run(output)[0].shared_share > 0.5
    change_report(output, prompt={"prompt_column": "text"})
    assert of_run(output)[0].shared_share == 0.0


def test_an_input_that_was_a_stream_is_said_not_to_be_looked_at(tmp_path: Path, clock: Clock) -> None:
    output = finished_run(tmp_path, clock, works(60, (8, 30), (30, 40)), allow_block_sharing=False, **ROOMY)
    for name in ("-", "https://example.com/rows.jsonl"):
        change_report(output, inputs=[name])
        assert any("in common is not known" in note and name in note for note in diagnose_run(str(output)).notes)


def test_drafts_that_save_more_than_they_cost_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    cost = CostModel(per_step_s=1e-2, per_query_token_s=2e-4, per_kv_token_s=0.0, per_request_s=1e-4)
    output = finished_run(tmp_path, clock, works(30, (8, 16), (30, 60)), speculation=64, cost=cost)
    change_report(output, drafted_tokens=2000, accepted_tokens=0)
    assert "speculation" in causes(diagnose_run(str(output)))
    change_report(output, accepted_tokens=900)  # each of which saved its share of a step
    assert "speculation" not in causes(diagnose_run(str(output)))


def test_finer_pages_keep_the_size_of_a_cache_that_was_given(tmp_path: Path, clock: Clock) -> None:
    settings = dict(PLANTED["paging"])
    first = diagnose_run(str(finished_run(tmp_path, clock, settings.pop("works"), **settings))).findings[0]
    assert first.advice.startswith("--page-size 16 and --num-blocks 256")
