"""Spec E19 over whole jobs on a tiny model: with `deterministic`, the same bits whatever was cut, killed or moved out.

Compared are texts, token ids and log-probabilities, which differ in their last bits where arithmetic does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import EngineConfig, JobConfig
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.speculation import PromptLookup
from cbatch.errors import EngineError, UsageError
from cbatch.jobs.merge import merge_parts
from cbatch.jobs.run import JobSummary, run_job
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.jobs.jobkit import read_rows
from tests.tiny_models import build_tiny

HEADER = "The same words stand before some of the rows, so that they share a prefix of several pages. "
COMPARED = ("id", "completion", "completions", "completion_token_ids", "token_logprobs", "finish_reason", "error")
TIGHT = {"num_blocks": 34, "safety_margin": 0.0}  # for two rows at a time, or for three while they are short


def make_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in range(12):
        row: dict[str, Any] = {"id": n, "prompt": (HEADER if n % 3 == 0 else "") + f"Row {n}: " + "once " * (3 * n)}
        row |= {"max_tokens": 24 + n, "temperature": n % 2, "ignore_eos": n % 4 > 0}
        rows.append(row | ({"n": 3} if n in (3, 4) else {}) | ({"seed": 7} if n == 5 else {}))
    return rows


@dataclass
class RealBench:
    """A folder with an input, and jobs over it on a model that is loaded once."""

    path: Path
    model: Path
    loaded: LoadedModel

    def run(self, name: str = "out", *, dies_after: int | None = None, **options: Any) -> JobSummary:
        """Run a job; engine settings and job settings are told apart by name. It may die after some rows."""
        engine_names = EngineConfig.__dataclass_fields__
        settings = {key: value for key, value in options.items() if key in engine_names}
        job = {key: value for key, value in options.items() if key not in engine_names}
        sampling = {"logprobs": 0}
        config = EngineConfig(
            model=str(self.model), **({"deterministic": True, "page_size": 8, "num_blocks": 256} | settings)
        )

        def load(config: EngineConfig) -> Engine:
            engine = Engine.over(self.loaded, config)
            if dies_after is not None:
                engine.steps = dying(engine.steps, dies_after)  # type: ignore[method-assign]
            return engine

        inputs = (str(self.path / "in.jsonl"),)
        output = str(self.path / f"{name}.jsonl")
        options = {"inputs": inputs, "output": output, "sampling": sampling, "return_token_ids": True} | job
        return run_job(JobConfig(**options), config, load_engine=load, quiet=True)

    def results(self, name: str = "out") -> dict[int, dict[str, Any]]:
        rows = read_rows(self.path / f"{name}.jsonl")
        assert all(row["error"] is None for row in rows)
        return {row["id"]: {column: row.get(column) for column in COMPARED} for row in rows}

    def report(self, name: str = "out") -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.path / f"{name}.jsonl.report.json").read_text())
        return report

    def write(self, rows: list[dict[str, Any]]) -> None:
        (self.path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


Steps = Callable[[Iterator[Prompt | None]], Iterator[list[RequestOutput]]]


def dying(steps: Steps, after: int) -> Steps:
    """Steps that fail once so many rows are finished."""

    def run(prompts: Iterator[Prompt | None]) -> Iterator[list[RequestOutput]]:
        count = 0
        for outputs in steps(prompts):
            if count >= after:
                raise EngineError("the device was lost")
            count += len(outputs)
            yield outputs

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    config = EngineConfig(model=str(model), dtype="float32")
    return load_model(config, inspect_model(config))


@pytest.fixture
def bench(tmp_path: Path, model: Path, loaded: LoadedModel) -> RealBench:
    bench = RealBench(tmp_path, model, loaded)
    bench.write(make_rows())
    return bench


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, model: Path, loaded: LoadedModel) -> dict[int, dict[str, Any]]:
    """What an undisturbed run gives."""
    bench = RealBench(tmp_path_factory.mktemp("whole"), model, loaded)
    bench.write(make_rows())
    bench.run()
    assert bench.report()["preemptions"] == 0
    results = bench.results()
    assert len({result["completion"] for result in results.values()}) == len(results)
    assert [len(set(results[n]["completions"])) for n in (3, 4)] == [3, 1], "greedy samples are alike"
    return results


def test_shards(bench: RealBench, expected: dict[int, dict[str, Any]]) -> None:
    for index in range(3):
        bench.run(shard=f"{index}/3")
    merge_parts(str(bench.path / "out.jsonl"))
    assert bench.results() == expected


def test_death_and_resume(bench: RealBench, expected: dict[int, dict[str, Any]]) -> None:
    for num_rows in (2, 4):
        with pytest.raises(EngineError):
            bench.run(dies_after=num_rows, max_requests_per_batch=3)
    assert 4 <= bench.run().rows_replayed < 12
    assert bench.results() == expected


def test_order_and_batch(bench: RealBench, expected: dict[int, dict[str, Any]]) -> None:
    bench.write(make_rows()[::-1])
    bench.run(max_requests_per_batch=1)
    assert bench.results() == expected


@pytest.mark.parametrize("settings", [{}, {"cpu_offload_space": 0.01}], ids=["soft resets", "offloads"])
def test_preemption(bench: RealBench, expected: dict[int, dict[str, Any]], settings: dict[str, Any]) -> None:
    bench.run(**TIGHT, **settings)
    report = bench.report()
    assert report["offloads" if settings else "soft_resets"] > 0
    assert bench.results() == expected


def test_speculation(bench: RealBench, expected: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [result["completion_token_ids"] for result in expected.values()]

    def propose(_: PromptLookup, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What some row says behind the same two tokens, which is right now and then."""
        said = (text[i : i + most] for text in texts for i in range(2, len(text)) if text[i - 2 : i] == token_ids[-2:])
        return tuple(next(said, (7,)))

    monkeypatch.setattr(PromptLookup, "propose", propose)
    bench.run(speculation=True)
    report = bench.report()
    assert report["settings"]["speculation"]["value"] == report["settings"]["max_batch_tokens"]["value"]
    assert report["drafted_tokens"] > report["accepted_tokens"] > 100
    assert bench.results() == expected


def test_a_given_seed_is_a_rows_own_whatever_the_jobs_is(bench: RealBench, expected: dict[int, dict[str, Any]]) -> None:
    """Neighbours without a seed draw other tokens then; the greedy and the seeded ones stay."""
    bench.run(seed=1)
    results = bench.results()
    changed = {n for n in results if results[n] != expected[n]}
    assert changed == {row["id"] for row in make_rows() if row["temperature"] and "seed" not in row}


def test_a_job_does_not_go_on_with_other_arithmetic(bench: RealBench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError):
        bench.run(dies_after=2)
    monkeypatch.setattr("cbatch.jobs.report.version", lambda package: "9.9")
    with pytest.raises(UsageError, match=r"torch 2\.\S+, and this run has 9\.9: deterministic cannot hold") as raised:
        bench.run()
    assert "--restart" in str(raised.value)
    assert bench.run(restart=True).rows_replayed == 0


def test_without_deterministic_a_job_goes_on_wherever_it_is(bench: RealBench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError):
        bench.run(dies_after=2, deterministic=False)
    monkeypatch.setattr("cbatch.jobs.report.version", lambda package: "9.9")
    assert bench.run(deterministic=False).rows_replayed >= 2
