"""Configurations of ours: what of them excludes one another, the model looked at, and what holds them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import DiagnoseConfig
from cbatch.diagnose.diagnosis import diagnose_settings
from cbatch.diagnose.findings import Diagnosis
from cbatch.diagnose.prefixes import shared_share
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
    assert shared_share([str(path)]) == pytest.approx(expected, abs=0.05)
    assert shared_share([str(tmp_path / "gone.jsonl")]) == 0.0
