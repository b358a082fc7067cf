"""Configurations of ours: what of them excludes one another, the model looked at, and what holds them back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import DiagnoseConfig
from cbatch.diagnose import prefixes
from cbatch.diagnose.diagnosis import diagnose_settings
from cbatch.diagnose.findings import Diagnosis
from cbatch.diagnose.prefixes import likeness
from cbatch.simulate.calibration import preset_calibration
from tests.tiny_models import build_tiny


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 40, "max_tokens": 30}\n' * 60)
    return str(path)


def diagnose(lengths: str, **values: Any) -> Diagnosis:
    return diagnose_settings("job.toml", values, DiagnoseConfig(lengths=lengths))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"template": "{{x}}", "prompt_column": "y"}, "--template with --prompt-column"),
        ({"shard": "0/2", "inputs": ("-",)}, "--shard with standard input, or another stream"),
        ({"shard": "0/2", "order": "completion"}, "--shard with --order completion"),
        ({"shard": "0/2", "output": "-"}, "--shard with standard output"),
        ({"deterministic": True, "device": "cuda"}, "deterministic with a GPU"),
    ],
)
def test_what_excludes_one_another_is_named(lengths: str, values: dict[str, Any], expected: str) -> None:
    assert [conflict.settings for conflict in diagnose(lengths, **values).conflicts] == [expected]


def test_the_model_is_looked_at(lengths: str, tmp_path: Path) -> None:
    experts = str(build_tiny("mixtral", tmp_path / "mixtral"))
    windows = str(build_tiny("gemma3", tmp_path / "gemma3"))
    found = diagnose(lengths, model=experts, deterministic=True, device="cpu")
    assert [conflict.settings for conflict in found.conflicts] == ["deterministic with a mixture of experts"]
    found = diagnose(lengths, model=windows, allow_block_sharing=True)
    assert [(c.settings, c.advice) for c in found.conflicts] == [
        ("allow_block_sharing with a model with sliding-window layers", "it is off by itself")
    ]
    missing = diagnose(lengths, model=str(tmp_path / "none"))
    assert missing.conflicts == ()
    assert any(note.startswith("the model was not looked at") for note in missing.notes)


def test_what_holds_it_back_is_simulated(lengths: str, tmp_path: Path) -> None:
    limited = diagnose(lengths, max_requests_per_batch=2)
    assert limited.findings[0].cause == "request limit"
    assert any("--calibration" in note for note in limited.notes)
    rows = tmp_path / "in.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": "a common beginning " * 30 + f"of row {n}"}) + "\n" for n in range(50))
    )
    alone = diagnose(lengths, allow_block_sharing=False, inputs=(str(rows),), max_batch_tokens=64)
    assert "prefix sharing" in {finding.cause for finding in alone.findings}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"prompt": "x" * 640}] * 10, 0.9),
        ([{"prompt": f"{n} differs" + "x" * 640} for n in range(10)], 0.0),
        ([{"prompt_token_ids": [1] * 160 + [n] * 160} for n in range(2, 12)], 0.45),
        (
            [
                {"messages": [{"role": "system", "content": "s" * 600}, {"role": "user", "content": str(n)}]}
                for n in range(9)
            ],
            0.8,
        ),
        ([{"other": 1}], 0.0),
    ],
)
def test_what_prompts_have_in_common_is_estimated(tmp_path: Path, rows: list[Any], expected: float) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = likeness([str(path)], {})
    assert found.share == pytest.approx(expected, abs=0.05)
    assert bool(found.unseen) == ("other" in rows[0]), "0 is said where it was seen only"


def test_what_the_prompt_is_made_of_is_what_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * 640, "text": f"{n} differs"}) + "\n" for n in range(10)))
    assert likeness([str(path)], {}).share == pytest.approx(0.9, abs=0.05)
    assert likeness([str(path)], {"prompt_column": "text"}).share == 0.0
    assert likeness([str(path)], {"template": "{{text}}" + "y" * 640}).share == 0.0
    assert likeness([str(path)], {"template": "y" * 640 + "{{text}}"}).share == pytest.approx(0.8, abs=0.1)
    assert "--template is no Jinja template" in likeness([str(path)], {"template": "{{"}).unseen


def test_what_would_be_read_again_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: list[str]) -> None:
        raise AssertionError(f"{names} is read")

    monkeypatch.setattr(prefixes, "open_source", refuse)
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", "s3://bucket/rows.jsonl", str(tmp_path / "pipe")):
        assert f"{name} is not read" in likeness([name], {}).unseen


def test_an_openai_batch_file_is_told_as_run_does(lengths: str, tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    path.write_text(json.dumps(row | {"body": {"messages": [{"role": "user", "content": "x"}]}, "text": "y"}) + "\n")
    given: dict[str, Any] = {"inputs": (str(path),), "output": "out.parquet"}
    assert [c.settings for c in diagnose(lengths, **given).conflicts] == ["an OpenAI Batch file with Parquet output"]
    assert diagnose(lengths, **given, prompt_column="text").conflicts == ()


def test_sharing_is_no_advice_where_the_model_allows_none(lengths: str, tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "%s"}\n' % ("a common beginning " * 60) * 50)
    given: dict[str, Any] = {"allow_block_sharing": False, "inputs": (str(rows),), "max_batch_tokens": 64}
    assert "prefix sharing" in {finding.cause for finding in diagnose(lengths, **given).findings}
    windows = str(build_tiny("gemma3", tmp_path / "gemma3"))
    assert "prefix sharing" not in {finding.cause for finding in diagnose(lengths, **given, model=windows).findings}


def test_what_is_assumed_is_said_and_nothing_else(lengths: str, tmp_path: Path) -> None:
    notes = diagnose_settings("job.toml", {}, DiagnoseConfig()).notes
    assert any("what steps cost is that of the preset h100-70b-fp8" in note for note in notes)
    assert any("what comes in is drawn as the preset h100-70b-fp8 says" in note for note in notes)
    engine = preset_calibration("h100-70b-fp8").engine
    size = f"max_model_len {engine.max_model_len} and a cache of {engine.num_blocks * engine.page_size} tokens"
    assert f"not given, so as in the preset: {size}" in notes
    notes = diagnose(lengths, max_model_len=4096, num_blocks=4096).notes
    assert [note.startswith("what steps cost") for note in notes] == [True], "the lengths are the user's"
    preset_calibration("h100-70b-fp8").save(tmp_path / "mine.json")
    config = DiagnoseConfig(lengths=lengths, calibration=str(tmp_path / "mine.json"))
    assert diagnose_settings("job.toml", {"max_model_len": 4096, "num_blocks": 4096}, config).notes == ()


def test_requests_that_do_not_fit_are_counted(lengths: str, tmp_path: Path) -> None:
    found = diagnose(lengths, max_model_len=64)
    assert any("60 of 60 simulated requests are left out" in note for note in found.notes)
    assert "no request fits" in found.verdict
    path = tmp_path / "mixed.jsonl"
    path.write_text(Path(lengths).read_text() + '{"prompt_tokens": 10, "max_tokens": 10}\n' * 40)
    found = diagnose(str(path), max_model_len=64)
    assert any("60 of 100 simulated requests are left out" in note for note in found.notes)
    assert found.unseen == ""
