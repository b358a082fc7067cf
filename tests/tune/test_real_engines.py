"""Searches over real engines on a tiny random model: limits hold, one cache at a time, and the file runs."""

from __future__ import annotations

import gc
import json
import tomllib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.tune import tune_command
from cbatch.config import EngineConfig, JobConfig, TuneConfig
from cbatch.engine.engine import Engine
from cbatch.errors import DoesNotFitError
from cbatch.jobs.run import run_job
from cbatch.models.memory import FreeMemory
from cbatch.tune.engines import LoadedEngines
from cbatch.tune.run import run_tune
from cbatch.tune.space import CHOICES, Value, build_space
from tests.tiny_models import build_tiny

ROWS = [{"prompt": "the end of the " + "an " * (i % 7) + str(i), "max_tokens": 4 + i % 5} for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


class Watched(LoadedEngines):
    """Keeps count of the engines that are in memory."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.engines: list[weakref.ref[Engine]] = []
        self.most_alive = 0
        self.most_requests = 0
        self.most_tokens = 0

    def build(self, settings: Mapping[str, Value]) -> Engine:
        engine = super().build(settings)
        self.engines.append(weakref.ref(engine))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.engines))
        engine.observe(self)
        return engine

    def on_step(self, record: Any) -> None:
        self.most_requests = max(self.most_requests, record.num_requests)
        self.most_tokens = max(self.most_tokens, record.prefill_tokens + record.decode_tokens)


def test_a_search_ends_in_settings_that_a_run_takes(model: Path, rows: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.toml"
    arguments = {"model": str(model), "trials": "3", "output": str(tuned), "quiet": True}
    assert tune_command([str(rows)], None, arguments) == 0
    found = tomllib.loads(tuned.read_text())
    evidence = found.pop("evidence")
    assert all(trial["status"] == "ok" for trial in evidence["trials"])
    assert all(trial["memory_bytes"] > 1 << 20 for trial in evidence["trials"])
    sample = evidence["sample"]
    assert sample["rows"] == len(ROWS)
    assert sample["mean_output_tokens"] <= sum(int(row["max_tokens"]) for row in ROWS) / len(ROWS)
    assert evidence["machine"]["device"] == "cpu"
    texts = []
    for config in (EngineConfig(**found), EngineConfig(model=str(model), page_size=32, max_batch_tokens=64)):
        output = tmp_path / f"{len(texts)}.jsonl"
        job = JobConfig(inputs=(str(rows),), output=str(output))
        assert run_job(job, config, quiet=True).rows_ok == len(ROWS)
        texts.append([json.loads(line)["completion"] for line in output.read_text().splitlines()])
    assert texts[0] == texts[1]  # settings decide how fast, never what (vllm-project/vllm#2492)


def test_limits_hold_in_trials_and_warm_up_and_one_cache_is_there_at_a_time(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """Three requests where memory is for two (NVIDIA/TensorRT-LLM#4986)."""
    sources: list[Watched] = []
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:6]))

    def load(config: EngineConfig) -> Watched:
        sources.append(Watched(config))
        return sources[-1]

    engine = EngineConfig(model=str(model), max_requests_per_batch=3, num_blocks=9, page_size=8, dtype="float32")
    job = JobConfig(inputs=(str(rows),), output="")
    summary = run_tune(
        job, engine, TuneConfig(output=str(tmp_path / "tuned.toml"), trials=2), {}, load=load, quiet=True
    )
    assert summary.findings is not None
    assert all(trial.outcome.ok for trial in summary.findings.book.trials)
    (source,) = sources
    assert source.most_requests <= 3
    assert source.most_tokens <= max(int(point[0]) for point in summary.findings.book.points)
    assert len(source.engines) == 1 + len(summary.findings.book.trials)
    assert source.most_alive == 1
    gc.collect()
    assert not any(ref() for ref in source.engines)


def test_what_does_not_fit_the_memory_is_not_proposed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of many tokens leave too little cache for the longest row that the default runs, or none."""
    monkeypatch.setattr("cbatch.engine.engine.free_memory", lambda _device: FreeMemory(48 << 20, "a test"))
    source = LoadedEngines(EngineConfig(model=str(model), dtype="float32", max_memory_percent=1.0))
    space = build_space(("max_batch_tokens",), source.plan, num_requests=300, num_tokens=10**6)
    proposed = {int(point[0]) for point in space.points}
    refused = {int(choice) for choice in CHOICES["max_batch_tokens"]} - proposed
    assert min(refused) > max(proposed) >= 512
    for tokens in refused:
        with pytest.raises(DoesNotFitError):
            source.plan({"max_batch_tokens": tokens})
    for tokens in proposed:
        assert source.plan({"max_batch_tokens": tokens}).max_batch_tokens == tokens
