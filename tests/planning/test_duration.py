"""How long a job is said to take, by each kind of file that something was measured into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import InputError, UsageError
from cbatch.planning.duration import Rates, Work, estimate, load_rates
from cbatch.simulate.calibration import Calibration
from cbatch.simulate.cost import CostModel
from cbatch.simulate.settings import SimulatedEngine

WORK = Work(rows=10, prompt_tokens=1_000, computed_tokens=1_290, output_tokens=500, step_s=None)
HERE = {"model": "m", "dtype": "float32", "device": "cpu"}
REPORT = {
    "rows_ok": 20,
    "generate_s": 40.0,
    "computed_tokens": 2_000,  # 1,200 of prompts and 800 of outputs
    "prompt_tokens": 1_600,
    "output_tokens": 820,
    "load_s": 3.0,
    "model": "m",
    "settings": {"dtype": {"value": "float32", "reason": ""}, "device": {"value": "cpu", "reason": ""}},
}


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_report_gives_computed_tokens_a_second(tmp_path: Path) -> None:
    rates = load_rates(write(tmp_path / "out.jsonl.report.json", REPORT))
    assert (rates.tokens_per_s, rates.load_s, rates.mean_prompt, rates.mean_output) == (50.0, 3.0, 80.0, 41.0)
    # 1,000 prompt tokens but for 200 found, and 500 outputs but for the last of each of 10.
    found = estimate(rates, WORK, HERE)
    assert (found.generate_s, found.load_s, found.doubts) == ((800 + 490) / 50, 3.0, ())
    assert "50.0 tokens/s" in found.source


def test_the_output_of_a_run_stands_for_its_report(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl.report.json", REPORT)
    assert load_rates(write(tmp_path / "out.jsonl", '{"completion": "x"}\n')).tokens_per_s == 50.0


def test_a_bench_gives_the_figures_of_the_way_that_a_job_runs(tmp_path: Path) -> None:
    results = {
        "naive": {"median": {"generate_s": 99.0, "load_s": 1.0}, "cached_tokens": 0},
        "continuous+chunked": {"median": {"generate_s": 10.0, "load_s": 2.0}, "cached_tokens": 95},
    }
    table = {"kind": "bench", "rows": 5, "prompt_tokens": 400, "output_tokens": 200, "results": results} | HERE
    rates = load_rates(write(tmp_path / "bench.json", table))
    assert (rates.tokens_per_s, rates.load_s) == ((400 - 95 + 200 - 5) / 10, 2.0)
    assert rates.facts == HERE
    del results["continuous+chunked"]
    with pytest.raises(UsageError, match=r"no figures of continuous\+chunked"):
        load_rates(write(tmp_path / "bench.json", table))


@pytest.mark.parametrize(("unit", "speed"), [("tokens/s with prompts", 30.0), ("output tokens/s", 30.0 * 150 / 50)])
def test_a_tuned_file_gives_the_speed_of_the_chosen_settings(unit: str, speed: float, tmp_path: Path) -> None:
    text = f"""
    model = "m"
    page_size = 16
    [evidence]
    unit = "{unit}"
    machine = {{ dtype = "float32", device = "cpu" }}
    sample = {{ mean_prompt_tokens = 100.0, mean_output_tokens = 50.0 }}
    [[evidence.trials]]
    chosen = false
    runs = [99.0]
    [[evidence.trials]]
    chosen = true
    runs = [29.0, 30.0, 31.0]
    """
    rates = load_rates(write(tmp_path / "tuned.toml", text))
    assert rates.tokens_per_s == pytest.approx(speed)
    # Prompt tokens that were found in the cache are among those that were timed.
    assert estimate(rates, WORK, HERE).generate_s == pytest.approx(1_500 / speed)


def test_a_calibration_of_simulate_gives_the_cost_of_steps(tmp_path: Path) -> None:
    cost = CostModel(per_step_s=0.5, per_query_token_s=0.01, per_kv_token_s=0.0, per_request_s=0.0)
    engine = SimulatedEngine(
        page_size=16, num_blocks=10, max_batch_tokens=8, max_requests_per_batch=2, max_model_len=64
    )
    Calibration(cost, engine, "a run").save(tmp_path / "calibration.json")
    rates = load_rates(str(tmp_path / "calibration.json"))
    assert rates.cost == cost
    work = Work(rows=10, prompt_tokens=1_000, computed_tokens=1_490, output_tokens=500, step_s=12.5)
    assert estimate(rates, work, HERE).generate_s == 12.5


def test_what_was_different_there_is_said(tmp_path: Path) -> None:
    rates = load_rates(write(tmp_path / "report.json", REPORT))
    found = estimate(rates, WORK, {"model": "other", "dtype": "float32", "device": "cpu"})
    assert found.doubts == ("model was m there and is other here",)
    longer = Work(rows=10, prompt_tokens=5_000, computed_tokens=5_000, output_tokens=10, step_s=None)
    assert estimate(rates, longer, HERE).doubts == (
        "prompts had 80 tokens there and have up to 500 here",
        "outputs had 41 tokens there and have up to 1 here",
    )


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("gone.json", None, InputError, "there is no file"),
        ("x.json", "no JSON", UsageError, "is nothing to calibrate by: it is not JSON"),
        ("x.json", [1], UsageError, "is nothing to calibrate by"),
        ("x.json", {"a": 1}, UsageError, "is no report of a run"),
        ("x.json", REPORT | {"generate_s": 0.0}, UsageError, "generated nothing"),
        ("x.json", {"kind": "bench"}, UsageError, "is no output of bench"),
        ("x.json", {"kind": "cbatch calibration"}, UsageError, "is no calibration"),
        ("x.toml", "page_size = 4", UsageError, "holds no measurement"),
        ("x.toml", "page_size = ", UsageError, "holds no measurement"),
    ],
)
def test_what_says_nothing_of_speed_is_a_mistake(
    name: str, content: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(error, match=message):
        load_rates(str(tmp_path / name))


def test_rates_of_no_facts_raise_no_doubts() -> None:
    rates = Rates(source="x", tokens_per_s=1.0, facts={})
    assert estimate(rates, WORK, HERE).doubts == ()
