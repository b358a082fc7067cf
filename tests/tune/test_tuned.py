"""The written file is what `run --config` takes: the same settings, whatever their kind, and the evidence aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.config_file import read_config_file
from cbatch.config import SamplingParams
from cbatch.engine.request import Prompt
from cbatch.errors import UsageError
from cbatch.tune.calibrate import Sample, choose_rungs
from cbatch.tune.findings import Findings
from cbatch.tune.noise import Gain
from cbatch.tune.search import Verdict
from cbatch.tune.space import Knob, Point, Space
from cbatch.tune.trial import Outcome, Trial, TrialBook
from cbatch.tune.tuned import check_target, write_tuned

DEFAULT, BETTER, WORSE, BROKEN = (16, 512), (64, 1024), (8, 512), (256, 8192)
SPACE = Space(
    (Knob("page_size", (8, 16, 64, 256)), Knob("max_batch_tokens", (512, 1024, 8192))),
    DEFAULT,
    (DEFAULT, BETTER, WORSE, BROKEN),
)
GAIN = Gain(0.2, 0.03)


def findings(chosen: Point = BETTER, *, output_tokens: int = 100, gain: Gain | None = GAIN) -> Findings:
    """Two rungs: the default over both, another over the first, the chosen one over the second too."""
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    prompts = tuple(Prompt(row, [1] * 200, sampling) for row in (4, 5, 6, 1))
    book = TrialBook()
    for point, rung, timed_s in (
        (DEFAULT, 0, 1.0),
        (BETTER, 0, 0.9),
        (WORSE, 0, 2.0),
        (DEFAULT, 1, 2.0),
        (BETTER, 1, 1.6),
        (BETTER, 1, 1.5),
        (DEFAULT, 1, 2.2),
    ):
        outcome = Outcome(status="ok", timed_s=timed_s, prompt_tokens=800, output_tokens=4 * output_tokens)
        book.add(Trial(point, rung, outcome))
    book.add(Trial(BROKEN, 0, Outcome(status="failed", reason="memory ran out")))
    verdict = Verdict(chosen, gain, 0.02, BETTER)
    return Findings(SPACE, Sample(prompts, (2, 4)), book, verdict)


CIRCUMSTANCES = {
    "model_identity": "ab12",
    "machine": {"processor": "P", "device": "cpu"},
    "sample": {"of_rows": 9, "seed": 3},
}


def test_every_kind_of_setting_comes_back(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": "models/ä \"x\" \\ '1'",
        "template": "Zeile 1\n\tQ: {{text}}\u2028\x7f\x01",
        "temperature": 0.5,
        "max_tokens": 64,
        "row_params": False,
        "stop": ("\n\n", "END"),
        "stop_token_ids": (5, 7),
        "logit_bias": ((5, -3.0), (7, 2.5)),
        "json_schema": '{"type": "object"}',
        "inputs": ("a.jsonl", "b.jsonl"),
        "logprobs": None,
    }
    path = tmp_path / "tuned.toml"
    write_tuned(path, given, findings(), CIRCUMSTANCES, is_whole=True)
    expected = {name: value for name, value in given.items() if value is not None}
    assert read_config_file(str(path)).settings == expected | {"page_size": 64, "max_batch_tokens": 1024}


def test_found_settings_stand_over_given_ones_and_a_kept_default_sets_none(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    given = {"model": "m", "max_batch_tokens": 512}
    write_tuned(path, given, findings(), CIRCUMSTANCES, is_whole=True)
    assert read_config_file(str(path)).settings == {"model": "m", "max_batch_tokens": 1024, "page_size": 64}
    write_tuned(path, given, findings(DEFAULT, gain=Gain(0.01, 0.03)), CIRCUMSTANCES, is_whole=False)
    assert read_config_file(str(path)).settings == given
    text = path.read_text()
    assert "# the default is kept: page_size 16, max_batch_tokens 512; nothing is faster beyond noise" in text
    assert "# The search was stopped before its end." in text
    assert all(len(line) <= 120 for line in text.splitlines() if line.startswith("#"))


def test_the_evidence_says_what_was_measured_on_what(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    write_tuned(path, {"model": "m"}, findings(), CIRCUMSTANCES, is_whole=True)
    evidence = read_config_file(str(path)).evidence
    assert evidence["conclusion"] == "page_size 64, max_batch_tokens 1024: +22.1% over the default (noise 3.0%)"
    assert evidence["machine"] == CIRCUMSTANCES["machine"]
    assert evidence["model_identity"] == "ab12"
    assert {"python", "cbatch", "torch"} <= evidence["versions"].keys()
    sample = evidence["sample"]
    assert (sample["rows"], sample["of_rows"], sample["runs_of_rows"], sample["rungs"]) == (4, 9, 2, [2, 4])
    assert (sample["mean_prompt_tokens"], sample["mean_output_tokens"], sample["seed"]) == (200, 100, 3)
    best, default, worse, broken = evidence["trials"]
    assert (best["page_size"], best["chosen"], best["default"], best["rows"]) == (64, True, False, 4)
    assert best["tokens_per_s"] == pytest.approx((400 / 1.6 + 400 / 1.5) / 2, rel=1e-3)
    assert best["runs"] == pytest.approx([250.0, 266.7])
    assert best["times_default"] == pytest.approx(258.3 / 190.9, rel=1e-3)
    assert (default["default"], default["times_default"]) == (True, 1.0)
    assert (worse["rows"], worse["times_default"]) == (2, 0.5)
    assert (broken["status"], broken["reason"]) == ("failed", "memory ran out")
    assert "tokens_per_s" not in broken


def test_where_outputs_are_few_prompts_count() -> None:
    found = findings(output_tokens=1)
    assert found.unit == "tokens/s with prompts"
    assert found.line(DEFAULT).tokens_per_s == pytest.approx((804 / 2 + 804 / 2.2) / 2)
    assert findings().unit == "output tokens/s"


def test_a_default_that_fails_is_told() -> None:
    found = findings(gain=None)
    found.book.add(Trial(DEFAULT, 1, Outcome(status="failed", reason="memory ran out")))
    assert found.conclusion() == "page_size 64, max_batch_tokens 1024 works; the default does not: memory ran out"


def test_rungs_grow_to_the_whole_sample_and_there_are_two_at_least() -> None:
    assert choose_rungs(100, whole=False) == (25, 50, 100)
    assert choose_rungs(20, whole=False) == (8, 10, 20)
    assert choose_rungs(9, whole=False) == (8, 9)
    assert choose_rungs(2, whole=False) == (2, 2)
    assert choose_rungs(100, whole=True) == (100, 100)


def test_a_target_that_would_replace_something_else_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("page_size = 4\n")
    for path, others, message in (
        (tmp_path / "out.jsonl", {}, r"the output of tune is a \.toml file"),
        (tmp_path, {}, r"\.toml file"),
        (mine, {}, "no search has written it"),
        (mine, {str(mine): "the configuration"}, "the configuration .* would be overwritten"),
    ):
        with pytest.raises(UsageError, match=message):
            check_target(path, others, replace=False)
    check_target(mine, {}, replace=True)
    write_tuned(mine, {"model": "m"}, findings(), CIRCUMSTANCES, is_whole=True)
    check_target(mine, {}, replace=False)
