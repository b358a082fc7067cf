"""A whole simulation: where costs, engine and workload come from, and what cannot be asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import SimulateConfig
from cbatch.engine.modes import CHUNKED, MODES
from cbatch.errors import CbatchError, InputError, OutputError, UsageError
from cbatch.io.gziplog import GzipLog, read_log
from cbatch.simulate import comparison as comparison_module
from cbatch.simulate.calibration import Calibration, load_calibration
from cbatch.simulate.comparison import UNPAGED, prepare_comparison
from cbatch.simulate.cost import CostModel
from cbatch.simulate.presets import PRESETS
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.shards import plan_shards
from cbatch.simulate.simulator import Simulator
from cbatch.simulate.workload import GivenWorkload, Lengths, SyntheticWorkload, Work
from tests.simulate.traces import draw, stop_the_clock, traced_run

COST = CostModel(per_step_s=0.01, per_query_token_s=1e-5, per_kv_token_s=1e-7, per_request_s=1e-5)
ENGINE = SimulatedEngine(
    page_size=16, num_blocks=400, max_batch_tokens=128, max_requests_per_batch=16, max_model_len=1024
)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A finished run with its trace and its report."""
    clock = stop_the_clock(monkeypatch)
    works = draw(3, 40, prompts=(5, 100), outputs=(2, 40), shared=32)
    traced_run(tmp_path / "out.jsonl.trace.jsonl.gz", clock, works)
    (tmp_path / "out.jsonl.report.json").write_text(json.dumps({"load_s": 7.5}))
    return str(tmp_path / "out.jsonl")


def prepare(engine: dict[str, Any] | None = None, **config: Any) -> Any:
    return prepare_comparison(SimulateConfig(**config), engine or {})


def test_a_traced_run_is_simulated_as_it_was(output: str) -> None:
    comparison = prepare(fit=output, modes="continuous+chunked")
    (case,) = comparison.cases
    figures = comparison.run(case)
    assert len(comparison.workload) == 40
    assert comparison.load_s == 7.5
    assert figures.duration_s == pytest.approx(comparison.measured_s, rel=0.05)
    assert figures.cached_tokens > 0


def test_a_run_with_other_settings_is_not_compared_with_its_time(output: str) -> None:
    assert prepare(fit=output, engine={"page_size": 32}).measured_s is None
    assert prepare(fit=output, rows=7).measured_s is None
    assert prepare(fit=output, arrivals=3.0).measured_s is None
    assert len(prepare(fit=output, rows=7).workload) == 7
    assert prepare(fit=output, engine={"page_size": 32}).engine.page_size == 32


def test_a_run_is_found_by_its_traces_name_too(output: str) -> None:
    named = prepare(fit=output + ".trace.jsonl.gz")
    assert named.load_s == 7.5
    assert named.measured_s == prepare(fit=output).measured_s is not None


def test_what_is_not_known_of_loading_is_left_out_and_said(output: str) -> None:
    Path(output + ".report.json").unlink()
    comparison = prepare(fit=output)
    assert (comparison.load_s, comparison.measured_s) == (None, None), "nor is a run done that has no report"
    plan = comparison.plan_shards(2)
    assert plan.load_s is None
    assert plan.duration_s == max(shard.duration_s for shard in plan.shards)


def test_a_resumed_jobs_rows_are_simulated_once_and_its_time_is_not_compared(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session ends what the first one had begun, and runs again a row that the journal had not got."""
    once = list(prepare(fit=output).workload)
    works = draw(3, 40, prompts=(5, 100), outputs=(2, 40), shared=32)
    clock = stop_the_clock(monkeypatch)
    traced_run(tmp_path / "out.jsonl.trace.jsonl.gz", clock, works[:10], num_blocks=300)
    resumed = prepare(fit=output)
    assert list(resumed.workload) == once
    assert resumed.measured_s is None
    assert resumed.engine.num_blocks == 300
    assert "in 2 sessions, of which the last one's engine is simulated" in resumed.calibration.source


def test_drafts_are_said_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = draw(3, 10, prompts=(5, 100), outputs=(2, 40))
    clock = stop_the_clock(monkeypatch)
    for drafts in (0, 8):
        traced_run(tmp_path / f"{drafts}.trace.jsonl.gz", clock, works, speculation=drafts)
    assert "drafts left out" not in prepare(fit=str(tmp_path / "0")).calibration.source
    assert "its drafts left out" in prepare(fit=str(tmp_path / "8")).calibration.source


def test_a_kept_calibration_is_read_back(output: str, tmp_path: Path) -> None:
    fitted = prepare(fit=output).calibration
    fitted.save(tmp_path / "kept.json")
    kept = load_calibration(tmp_path / "kept.json")
    assert (kept.cost, kept.engine) == (fitted.cost, fitted.engine)
    with pytest.raises(OutputError, match="cannot write"):
        fitted.save(tmp_path / "nowhere" / "kept.json")
    assert [path.name for path in tmp_path.iterdir() if "kept" in path.name] == ["kept.json"]
    comparison = prepare(calibration=str(tmp_path / "kept.json"), rows=5)
    assert comparison.calibration.cost == fitted.cost


def test_the_preset_brings_engine_and_workload_and_options_win() -> None:
    preset = PRESETS["h100-70b-fp8"]
    comparison = prepare()
    assert [case.name for case in comparison.cases][:2] == [UNPAGED, "naive"]
    assert len(comparison.workload) == preset.rows
    changed = prepare(rows=3, prompt_tokens="9", engine={"max_requests_per_batch": 2}, modes="static")
    assert [(work.prompt_tokens, work.output_tokens > 9) for work in changed.workload] == [(9, True)] * 3
    assert [case.engine.max_requests_per_batch for case in changed.cases] == [2, 2]


def test_long_simulations_run_side_by_side_and_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = prepare(rows=40, prompt_tokens="9-30", output_tokens="5-9")
    alone = list(comparison.run_all())
    assert [case.name for case, _ in alone] == [case.name for case in comparison.cases]
    monkeypatch.setattr(comparison_module, "PARALLEL_FROM", 40)
    assert list(comparison.run_all()) == alone


def test_nothing_is_hashed_where_nothing_is_shared() -> None:
    assert not prepare(rows=3).engine.allow_block_sharing
    assert prepare(rows=3, shared_prefix=32).engine.allow_block_sharing
    assert not prepare(rows=3, shared_prefix=32, engine={"allow_block_sharing": False}).engine.allow_block_sharing


def test_an_engine_without_pages_holds_as_many_requests_as_it_can_reserve_for() -> None:
    engine = ENGINE.unpaged(1000)
    works = GivenWorkload([Work(20, 20)] * 48)
    figures = Simulator(engine, COST, mode="static").run(works)
    assert engine.num_blocks == 6
    assert figures.mean_running == pytest.approx(6, abs=0.4)
    with pytest.raises(UsageError, match="holds no request"):
        ENGINE.unpaged(10_000)


def test_a_request_without_pages_takes_its_reservation_at_once_and_reads_what_is_in_it() -> None:
    reading = CostModel(per_step_s=0, per_query_token_s=0, per_kv_token_s=1, per_request_s=0)
    simulator = Simulator(ENGINE.unpaged(1000), reading, mode="static")
    figures = simulator.run(GivenWorkload([Work(20, 3), Work(900, 100), Work(900, 101)]))
    assert figures.refused == 1, "there is no second reservation for what outgrows the first"
    assert figures.duration_s == (20 + 900) + (21 + 901) + (22 + 902) + sum(range(903, 1000))
    assert figures.mean_cache_usage == pytest.approx((1 + 3 * 2 + 97) / 6 / 101), "the prompts take a step each"


def test_shards_are_simulated_each_by_itself() -> None:
    workload = SyntheticWorkload(
        count=101, prompt_tokens=Lengths.parse("10-90", 500), output_tokens=Lengths.parse("5-50", 500)
    )
    works = list(workload)
    plan = plan_shards(ENGINE, COST, workload, 4, load_s=60.0)
    alone = [Simulator(ENGINE, COST).run(GivenWorkload(works[101 * i // 4 : 101 * (i + 1) // 4])) for i in range(4)]
    assert list(plan.shards) == alone
    assert plan.duration_s == 60 + max(shard.duration_s for shard in alone)
    assert plan.gpu_hours == pytest.approx(sum(60 + shard.duration_s for shard in alone) / 3600)
    assert plan.duration_s < 60 + plan_shards(ENGINE, COST, workload, 1, load_s=60.0).duration_s - 60
    assert len(plan_shards(ENGINE, COST, GivenWorkload(works[:2]), 5, 0.0).shards) == 2


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"preset": "b200"}, "there is no preset b200 .*h100-70b-fp8"),
    ({"modes": "static,fast"}, "--modes names 'fast', which is none .*continuous"),
    ({"modes": ","}, "--modes names '', which is none"),
    ({"preset": "h100-70b-fp8", "fit": "out"}, "both say what steps cost"),
    ({"fit": "nowhere.jsonl"}, "no trace of nowhere.jsonl .*--trace"),
    ({"calibration": "nowhere.json"}, "cannot read nowhere.json"),
    ({"prompt_tokens": "many"}, "no distribution of lengths"),
    ({"reserve": 10**9}, "holds no request that reserves"),
    ({"prompt_tokens": "10000"}, "--prompt-tokens 10000 goes beyond the 8191 tokens .*--max-model-len"),
    ({"prompt_tokens": "1-" + "9" * 400}, "--prompt-tokens .* goes beyond|no distribution of lengths"),
    ({"output_tokens": "9" * 30}, "--output-tokens 9* goes beyond"),
    ({"output_tokens": "lognormal:9000:0.1"}, "--output-tokens lognormal:9000:0.1 goes beyond"),
    ({"prompt_tokens": "8190", "output_tokens": "50"}, "the shortest has 8240 tokens, .* may have 8192"),
    ({"arrivals": 1e-320}, "--arrivals .* lets 1000 requests take centuries"),
    ({"arrivals": 1e-9}, "--arrivals 1e-09 lets"),
    ({"reserve": 79}, "no request can run in 'static, no pages': .* may have 79 .*--reserve"),
]


def test_a_context_or_a_cache_for_no_request_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a context of 1 tokens holds no prompt with a completion .*--max-model-len"):
        prepare(engine={"max_model_len": 1})
    (tmp_path / "in.jsonl").write_text('{"prompt_tokens": 500, "max_tokens": 6}\n{"prompt_tokens": 9, "max_tokens": 6}')
    kept = str(tmp_path / "kept.json")
    Calibration(COST, ENGINE, "x").save(Path(kept))
    assert len(prepare(lengths=str(tmp_path / "in.jsonl"), reserve=16, engine={"num_blocks": 1}).workload) == 2
    with pytest.raises(UsageError, match=r"the shortest has 15 tokens, .* may have 11 .*--num-blocks"):
        prepare(lengths=str(tmp_path / "in.jsonl"), calibration=kept, engine={"num_blocks": 10, "page_size": 1})


def test_defaults_are_cut_to_the_context_and_do_not_refuse_it(tmp_path: Path) -> None:
    Calibration(COST, replace(ENGINE, max_model_len=300), "x").save(tmp_path / "kept.json")
    workload = prepare(calibration=str(tmp_path / "kept.json")).workload
    assert max(work.prompt_tokens for work in workload) == 299


@pytest.mark.parametrize(("config", "words"), MISTAKES)
def test_what_cannot_be_is_said(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CbatchError, match=words):
        prepare(**config)


def test_lengths_are_given_or_drawn_and_not_both(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt_tokens": 5, "max_tokens": 6}\n')
    assert list(prepare(lengths=str(tmp_path / "in.jsonl")).workload) == [Work(5, 6)]
    with pytest.raises(UsageError, match="--shared-prefix draws requests"):
        prepare(lengths=str(tmp_path / "in.jsonl"), shared_prefix=4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json", "not JSON"),
        ("[]", "is no calibration"),
        ('{"kind": "another"}', "is no calibration"),
        ('{"kind": "cbatch calibration"}', "no table of CostModel"),
        ('{"kind": "cbatch calibration", "cost": {"per_step_s": 1}}', "lacks per_query_token_s"),
        ('{"kind": "cbatch calibration", "cost": {"per_step_s": -1}}', "per_step_s in .* must be a number"),
        ('{"kind": "cbatch calibration", "cost": {"per_step_s": "1"}}', "per_step_s in .* must be a number"),
    ],
)
def test_what_is_no_calibration_is_said(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        load_calibration(tmp_path / "file.json")


def test_a_trace_in_which_nothing_finished_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.trace.jsonl.gz"
    traced_run(path, stop_the_clock(monkeypatch), draw(3, 1, prompts=(50, 60), outputs=(20, 30)))
    lines = list(read_log(path))
    path.unlink()
    log = GzipLog(path)
    log.append([json.dumps(line).encode() + b"\n" for line in lines[:-1]])
    log.close()
    with pytest.raises(InputError, match="no request finished in the trace"):
        prepare(fit=str(tmp_path / "out"))


def test_a_trace_that_says_too_little_is_said(tmp_path: Path) -> None:
    log = GzipLog(tmp_path / "out.trace.jsonl.gz")
    log.append([b'{"session": 1, "settings": {}, "layers": [[null, 1]]}\n'])
    log.close()
    with pytest.raises(InputError, match="holds no step"):
        prepare(fit=str(tmp_path / "out"))
    assert Calibration(COST, ENGINE, "x").engine.changed({"unknown": 1}) == ENGINE


@pytest.mark.parametrize(
    "name", ["page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_model_len"]
)
@pytest.mark.parametrize("value", [0, -1, 2.5, "16", True])
def test_an_engine_without_a_whole_count_of_everything_is_refused(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value!r}; it must be a whole number, at least 1"):
        ENGINE.changed({name: value})
    Calibration(COST, ENGINE, "x").save(tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    kept["engine"][name] = value
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    with pytest.raises(UsageError, match=name):
        load_calibration(tmp_path / "kept.json")


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 10**9}, {"safety_margin": 1.0}, {"scheduler_type": "lifo"}, {"num_host_pages": -1}]
)
def test_other_settings_that_no_engine_has_are_refused_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ENGINE.changed(wrong)


def test_pages_of_another_size_leave_the_cache_its_tokens() -> None:
    assert ENGINE.changed({"page_size": 64}).num_blocks == 100
    assert ENGINE.changed({"page_size": 64, "num_blocks": 7}).num_blocks == 7
    assert ENGINE.changed({"page_size": 16}) == ENGINE
    with pytest.raises(UsageError, match="a page of 6401 tokens is larger than the whole cache, of 6400"):
        ENGINE.changed({"page_size": 6401})


def test_another_scheduler_has_its_own_margin_unless_one_was_given() -> None:
    def margin(engine: SimulatedEngine) -> float:
        return engine.build(MODES[CHUNKED])[1]._safety_margin

    default, given = replace(ENGINE, safety_margin=0.15), replace(ENGINE, safety_margin=0.3)
    assert margin(default.changed({"scheduler_type": "offline"})) == 0
    assert margin(default.changed({"page_size": 32})) == 0.15
    assert margin(given.changed({"scheduler_type": "offline"})) == 0.3
    assert margin(default.changed({"scheduler_type": "offline", "safety_margin": 0.15})) == 0.15
