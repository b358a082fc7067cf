"""A run with tuned settings says where its model, machine or rows are not those that they were tuned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.tune import evidence
from cbatch.tune.evidence import machine_facts, other_circumstances, other_work

SETTINGS: dict[str, dict[str, object]] = {
    "device": {"value": "cpu", "reason": ""},
    "dtype": {"value": "float32", "reason": ""},
    "num_threads": {"value": 2, "reason": ""},
    "page_size": {"value": 64, "reason": ""},
}
MODEL = b"\xab\xcd"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("processor\t: 0\nmodel name\t: Some CPU\nmodel name\t: Some CPU\n")
    monkeypatch.setattr(evidence, "CPU_INFO", cpu_info)
    return {
        "model_identity": MODEL.hex(),
        "machine": machine_facts(SETTINGS),
        "sample": {"mean_prompt_tokens": 100.0, "mean_output_tokens": 50.0},
    }


def test_the_machine_is_processor_device_data_type_and_threads(measured: dict[str, Any]) -> None:
    expected = {"processor": "Some CPU", "device": "cpu", "dtype": "float32", "num_threads": 2}
    assert measured["machine"] == expected


def test_where_nothing_differs_nothing_is_said(measured: dict[str, Any]) -> None:
    assert other_circumstances(measured, SETTINGS, MODEL) is None
    assert other_circumstances({}, SETTINGS, MODEL) is None


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({}, b"\x01", "another model, revision or data type"),
        ({"dtype": "bfloat16"}, MODEL, "dtype bfloat16 instead of float32"),
        ({"num_threads": 64}, MODEL, "num_threads 64 instead of 2"),
    ],
)
def test_other_models_and_machines_are_told(
    measured: dict[str, Any], changes: dict[str, object], model: bytes, words: str
) -> None:
    settings = SETTINGS | {name: {"value": value, "reason": ""} for name, value in changes.items()}
    note = other_circumstances(measured, settings, model)
    assert note is not None
    assert words in note
    assert "cbatch tune finds the settings for it" in note


def test_another_processor_is_told(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evidence, "CPU_INFO", tmp_path / "gone")
    assert "processor unknown instead of Some CPU" in (other_circumstances(measured, SETTINGS, MODEL) or "")


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"rows_ok": 10, "prompt_tokens": 1500, "output_tokens": 400}, None),
        ({"rows_ok": 10, "prompt_tokens": 9000, "output_tokens": 400}, "prompts of 900 tokens instead of 100"),
        ({"rows_ok": 10, "prompt_tokens": 1000, "output_tokens": 100}, "outputs of 10 tokens instead of 50"),
        ({"rows_ok": 0, "prompt_tokens": 0, "output_tokens": 0}, None),
        ({}, None),
    ],
)
def test_other_lengths_are_told_after_the_run(measured: dict[str, Any], report: dict[str, Any], words: str) -> None:
    note = other_work(measured, report)
    assert (note is None) == (words is None)
    assert words is None or words in (note or "")
    assert other_work({}, report) is None
