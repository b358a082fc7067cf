"""What a plan says of a job is what a run then does: on tiny models, with caches that are ample and far too small."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import EngineConfig, JobConfig
from cbatch.engine.engine import Engine
from cbatch.engine.stats import EngineStats
from cbatch.jobs.opening import prepare_rows
from cbatch.jobs.preview import FailedRow, preview_rows
from cbatch.jobs.run import run_job
from cbatch.models.load import LoadedModel
from cbatch.planning import job_plan
from cbatch.planning.job_plan import JobPlan, plan_job
from cbatch.planning.summary import summarize
from tests.engine.tiny_engine import load_tiny
from tests.tiny_models import build_tiny

COUNTS = ("steps", "prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens", "output_tokens")
COUNTS += ("preemptions", "offloads", "soft_resets", "kv_waste_fraction", "max_cache_usage")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model that shares blocks, and one with sliding windows that does not."""
    return build_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_tiny(folder)


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def make_job(path: Path, rows: list[Any], **options: Any) -> JobConfig:
    sampling = {"ignore_eos": True, "max_tokens": 6} | options.pop("sampling", {})
    return JobConfig(inputs=(write_rows(path, rows),), output="", sampling=sampling, **options)


def make_plan(job: JobConfig, config: EngineConfig, calibration: str | None = None) -> JobPlan:
    ticks: list[None] = []
    plan = plan_job(job, config, calibration, lambda: ticks.append(None))
    assert len(ticks) == plan.rows.num_rows
    return plan


def run_engine(job: JobConfig, config: EngineConfig, loaded: LoadedModel) -> EngineStats:
    """Run the job's prompts through an engine with the model, all of them ready from the start."""
    engine = Engine.over(loaded, replace(config, dtype="float32"))
    length = engine.plan.max_model_len
    ready = preview_rows(prepare_rows(job), engine.tokenizer, engine.generation_defaults, length)
    prompts = [row.prompt for row in ready if not isinstance(row, FailedRow)]
    for _ in engine.generate(prompts):
        pass
    return engine.stats


def shared_rows(seed: int, count: int = 24) -> list[dict[str, Any]]:
    """Prompts that begin alike in groups, some of them the same, a few long ones."""
    rng = random.Random(seed)
    headers = [[rng.randrange(5, 250) for _ in range(rng.randrange(8, 60))] for _ in range(4)]
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        if rows and rng.random() < 0.1:
            rows.append(dict(rng.choice(rows)))
            continue
        own = [rng.randrange(5, 250) for _ in range(rng.randrange(1, 30))]
        rows.append({"prompt_token_ids": [*rng.choice(headers), *own], "max_tokens": rng.randrange(1, 25)})
    return rows


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 400},
        {"num_blocks": 40, "max_batch_tokens": 24, "max_requests_per_batch": 6},  # little memory: blocks are given up
        {"num_blocks": 24, "max_requests_per_batch": 16, "safety_margin": 0.0},  # too little: requests move out
        {"num_blocks": 24, "max_requests_per_batch": 16, "safety_margin": 0.0, "cpu_offload_space": 0.01},
        {"num_blocks": 60, "scheduler_type": "prefill_first"},
        {"num_blocks": 60, "allow_block_sharing": False},
    ],
)
def test_a_plans_counts_are_those_of_the_run(
    settings: dict[str, Any], folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(folder), page_size=4, **({"speculation": False} | settings))
    job = make_job(tmp_path / "in.jsonl", shared_rows(seed=len(settings)))
    plan, stats = make_plan(job, config), run_engine(job, config, loaded)
    assert plan.dry is not None
    assert {name: getattr(plan.dry.stats, name) for name in COUNTS} == {name: getattr(stats, name) for name in COUNTS}
    assert plan.dry.num_rows == plan.rows.num_ok == 24
    assert sum(plan.rows.lengths.outputs) == stats.output_tokens


def test_a_run_that_guesses_tokens_takes_fewer_steps_than_its_plan(
    folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    rows = [{"prompt_token_ids": [7, 9, 9, 9], "max_tokens": 40, "logit_bias": {"9": 100}}] * 3
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=200, speculation=True)
    job = make_job(tmp_path / "in.jsonl", rows)
    plan, stats = make_plan(job, config), run_engine(job, config, loaded)
    assert plan.dry is not None
    assert plan.dry.stats.output_tokens == stats.output_tokens == 120
    assert plan.dry.stats.prompt_tokens == stats.prompt_tokens
    assert plan.dry.stats.steps > stats.steps


def test_the_cases_are_not_too_tame(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    job = make_job(tmp_path / "in.jsonl", shared_rows(seed=3))
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=24, max_requests_per_batch=16, safety_margin=0.0)
    dry = make_plan(job, config).dry
    assert dry is not None
    assert dry.stats.preemptions > 0
    assert dry.stats.recomputed_tokens > 0
    assert dry.stats.cached_tokens > 0


@pytest.mark.parametrize(
    "asked", [{"n": 3, "temperature": 1.0}, {"prompt_logprobs": 0}, {"logprobs": 2}, {"stop": "x"}, {"max_tokens": 0}]
)
def test_what_rows_ask_for_beside_length_changes_counts_as_in_the_run(
    asked: dict[str, Any], folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    rows = [row | asked for row in shared_rows(seed=7, count=10)]
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=300, speculation=False)
    job = make_job(tmp_path / "in.jsonl", rows)
    plan, stats = make_plan(job, config), run_engine(job, config, loaded)
    assert plan.dry is not None
    for name in ("prompt_tokens", "cached_tokens", "computed_tokens"):
        assert getattr(plan.dry.stats, name) == getattr(stats, name) or "stop" in asked
    assert plan.dry.stats.output_tokens >= stats.output_tokens


def test_samples_take_slots_each_and_the_duration_rests_on_what_is_computed(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [5] * 100, "max_tokens": 90, "n": 8, "temperature": 1.0}] * 2
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=600, max_model_len=200)
    job = make_job(tmp_path / "in.jsonl", rows)
    rate = tmp_path / "run.report.json"
    settings = {"dtype": {"value": "float32"}, "device": {"value": "cpu"}}
    counts = {"rows_ok": 1, "computed_tokens": 100, "prompt_tokens": 50, "output_tokens": 50}
    rate.write_text(json.dumps({**counts, "generate_s": 1.0, "load_s": 1.0, "model": "m", "settings": settings}))
    plan = plan_job(job, config, str(rate), lambda: None)
    memory = summarize(plan)["memory"]
    assert memory["contiguous_waste"] == pytest.approx(1 - 190 / 200)
    assert memory["paged_waste"] == pytest.approx(1 - 190 / 192)
    assert memory["contexts_at_once_paged"] == 600 * 4 // 190
    assert plan.dry is not None
    assert plan.estimate is not None
    assert plan.estimate.generate_s == pytest.approx(plan.dry.stats.computed_tokens / 100)


def test_rows_that_fail_are_those_of_the_run_in_the_same_words(folder: Path, tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "fine"},
        "{broken",
        {"prompt": "x", "temprature": 1},
        {"prompt": 5},
        {"nothing": 1},
        {"prompt_token_ids": [99_999]},
        {"prompt_token_ids": list(range(5, 205)), "max_tokens": 5},
        {"prompt_token_ids": [5] * 120, "max_tokens": 80},  # fits the context, and never the cache
        {"prompt": "x", "stop_token_ids": [4_000]},
        {"prompt": "x", "regex": "("},
        {"prompt": "half a character \ud800"},
        {"prompt": "fine as well"},
    ]
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=40, max_model_len=200)
    job = make_job(tmp_path / "in.jsonl", rows)
    rows_planned = make_plan(job, config).rows
    run_job(replace(job, output=str(tmp_path / "out.jsonl")), config, quiet=True)
    done = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    failed = {row["row"]: row["error"] for row in done if row["error"] is not None}
    assert {e.row: {"code": e.code, "message": e.message} for e in rows_planned.shown} == failed
    assert rows_planned.num_errors == len(failed) == 10
    assert rows_planned.num_ok == 2


def test_a_reports_counts_are_foretold_through_files_too(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    config = EngineConfig(model=str(folder), page_size=4, num_blocks=400, speculation=False)
    job = make_job(tmp_path / "in.jsonl", [*shared_rows(seed=5), {"prompt": "and the rest"}, {"prompt": None}])
    dry = make_plan(job, config).dry
    run_job(replace(job, output=str(tmp_path / "out.jsonl")), config, quiet=True)
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert dry is not None
    for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens"):
        assert getattr(dry.stats, name) == report[name] > 0


def test_an_openai_batch_file_is_read_as_one(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    body = {"model": "m", "messages": [{"role": "user", "content": "the and in"}], "max_tokens": 3}
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body | extra}
        for i, extra in enumerate([{}, {"max_tokens": 5}, {"max_tokens": -1}])
    ]
    plan = make_plan(make_job(tmp_path / "in.jsonl", rows), EngineConfig(model=str(folder), num_blocks=50))
    assert (plan.rows.num_ok, dict(plan.rows.errors)) == (2, {"bad_parameter": 1})
    assert list(plan.rows.lengths.outputs) == [3, 5]


def test_the_shareable_prefix_is_an_upper_bound_that_counts_no_prompt_whole(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    rows = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [5, 6, 7, 8, 9], [20, 21])]
    job = make_job(tmp_path / "in.jsonl", rows)
    for page_size, cached in ((1, 4 + 4), (4, 4 + 4), (16, 0)):
        plan = make_plan(job, EngineConfig(model=str(folder), num_blocks=100, page_size=page_size))
        assert plan.rows.shareable_tokens == 8  # the last token of a prompt is computed in any case
        assert plan.dry is not None
        assert plan.dry.stats.cached_tokens == cached


def test_rows_beyond_what_is_run_dry_are_counted_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(job_plan, "DRY_TOKENS", 20)
    rows = [{"prompt": "the", "max_tokens": 6}] * 9 + [{"prompt": 1}]
    plan = make_plan(make_job(tmp_path / "in.jsonl", rows), EngineConfig(model=str(folder), num_blocks=50))
    assert plan.dry is not None
    assert (plan.dry.num_rows, plan.rows.num_ok, plan.rows.num_errors) == (3, 9, 1)
    assert plan.dry.stats.output_tokens == 18


def test_a_cache_that_does_not_fit_is_told_with_all_the_rest(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    job = make_job(tmp_path / "in.jsonl", [{"prompt": "the and"}, {"prompt": 1}])
    plan = make_plan(job, EngineConfig(model=str(folder), num_blocks=10**9))
    assert (plan.plan, plan.dry) == (None, None)
    assert plan.misfit is not None
    assert "num_blocks 1000000000 needs" in str(plan.misfit)
    assert (plan.rows.num_ok, plan.rows.num_errors, list(plan.rows.lengths.outputs)) == (1, 1, [6])


def test_weights_are_taken_off_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    job = make_job(tmp_path / "in.jsonl", [{"prompt": "the and"}])
    seen = []
    real = job_plan.plan_over

    def spy(*arguments: Any, memory: Any) -> Any:
        seen.append(memory.num_bytes)
        return real(*arguments, memory=memory)

    monkeypatch.setattr(job_plan, "plan_over", spy)
    plan = make_plan(job, EngineConfig(model=str(folder), num_blocks=10))
    assert plan.weights is not None
    assert seen == [plan.memory.num_bytes - plan.weights]
