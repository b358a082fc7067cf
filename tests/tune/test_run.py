"""Whole searches over stub engines: what is sampled, measured, kept and written, and what if one is stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import EngineError, InputError, UsageError
from cbatch.tune.journal import DIED
from tests.stub_engine import DEFAULT_LENGTH
from tests.tune.stub_engines import BEST, TunePlan
from tests.tune.tunekit import Case, rows


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_the_best_settings_are_found_and_written(case: Case) -> None:
    summary = case.run(trials=10)
    assert (summary.reason, summary.exit_code) == (None, 0)
    assert summary.findings is not None
    found = dict(zip(summary.findings.space.names, summary.findings.verdict.point, strict=True))
    assert found == BEST
    tuned = case.tuned()
    assert {name: tuned[name] for name in BEST} == BEST
    assert tuned["model"] == str(case.path / "model")
    assert tuned["evidence"]["gain"] > 0.5


def test_the_model_is_loaded_once_and_an_engine_built_a_trial(case: Case) -> None:
    summary = case.run(trials=4)
    assert summary.findings is not None
    assert len(case.sources) == 1
    assert case.num_built == 1 + len(summary.findings.book.trials)  # and one to find the lengths


def test_all_trials_over_a_sample_do_the_same_work(case: Case) -> None:
    """Rows that end by themselves get the length that they had."""
    case.write([*rows(12), *rows(12, max_tokens=3)])
    summary = case.run(trials=4)
    assert summary.findings is not None
    work = {(t.rung, t.outcome.prompt_tokens, t.outcome.output_tokens) for t in summary.findings.book.trials}
    assert len(work) == len({rung for rung, _, _ in work}) > 1
    whole = summary.findings.sample.rungs[-1]
    timed = case.sources[0].engines[-1].prompts[-whole:]
    lengths = sorted(prompt.sampling.max_tokens or 0 for prompt in timed)
    assert lengths == [3] * 12 + [DEFAULT_LENGTH] * 12
    assert all(prompt.sampling.ignore_eos for prompt in timed)


def test_prompts_are_rendered_as_a_run_does(case: Case) -> None:
    case.write({"text": f"text {i}", "max_tokens": 5} for i in range(6))
    case.run(trials=2, template="Say: {{text}}", system_prompt="Be brief.", sampling={"temperature": 0.5})
    source = case.sources[0]
    prompt = max(source.engines[0].prompts, key=lambda p: p.request_id)
    assert source.tokenizer.decode(prompt.token_ids) == "system: Be brief.\nuser: Say: text 5\nassistant: "
    assert (prompt.sampling.max_tokens, prompt.sampling.temperature) == (5, 0.5)


def test_row_parameters_can_be_left_aside(case: Case) -> None:
    case.write(rows(4, max_tokens=3))
    case.run(trials=2, row_params=False)
    assert all(prompt.sampling.max_tokens is None for prompt in case.sources[0].engines[0].prompts)


def test_given_options_hold_in_every_trial(case: Case) -> None:
    summary = case.run(trials=4, page_size=32, scheduler_type="prefill_first")
    assert summary.findings is not None
    assert summary.findings.space.names == ("max_batch_tokens",)
    assert {engine.plan.page_size for engine in case.sources[0].engines} == {32}
    assert {engine.plan.scheduler_type for engine in case.sources[0].engines} == {"prefill_first"}
    tuned = case.tuned()
    assert (tuned["page_size"], tuned["scheduler_type"]) == (32, "prefill_first")


def test_a_given_bad_setting_is_recovered_where_it_is_searched(case: Case) -> None:
    summary = case.run(trials=10, max_batch_tokens=32, search=("max_batch_tokens",))
    assert summary.findings is not None
    assert summary.findings.space.baseline == (16, 32)
    assert case.tuned()["max_batch_tokens"] == BEST["max_batch_tokens"]


def test_a_default_that_is_kept_sets_nothing(case: Case) -> None:
    case.options = {"default": TunePlan(**BEST)}
    summary = case.run(trials=5)
    assert summary.findings is not None
    assert summary.findings.keeps_default
    tuned = case.tuned()
    assert "page_size" not in tuned
    assert "max_batch_tokens" not in tuned
    assert "the default is kept" in tuned["evidence"]["conclusion"]
    assert "# the default is kept" in case.output.read_text()


def test_the_order_of_candidates_and_slow_first_steps_decide_nothing(tmp_path: Path) -> None:
    """vllm-project/vllm#34776: three seconds in every engine's first step, other seeds propose in another order."""
    chosen = set()
    for seed, first_step_s in ((0, 0.0), (1, 3.0), (2, 3.0)):
        (folder := tmp_path / str(seed)).mkdir()
        case = Case(folder)
        case.options = {"first_step_s": first_step_s}
        summary = case.run(trials=10, seed=seed)
        assert summary.findings is not None
        chosen.add(summary.findings.verdict.point)
    assert chosen == {tuple(BEST.values())}


def failing(*page_sizes: int, error: BaseException | None = None) -> Any:
    def build(settings: Mapping[str, object]) -> None:
        if settings.get("page_size") in page_sizes:
            raise error or MemoryError

    return build


def test_trials_that_run_out_of_memory_are_results(case: Case) -> None:
    case.options = {"on_build": failing(64, 128, 256)}
    summary = case.run(trials=10)
    assert summary.reason is None
    assert case.tuned()["page_size"] == 32
    failed = [trial for trial in case.tuned()["evidence"]["trials"] if trial["status"] == "failed"]
    assert failed
    assert {trial["reason"] for trial in failed} == {"memory ran out"}


def test_default_settings_that_do_not_work_are_an_error(case: Case) -> None:
    def build(_settings: Mapping[str, object]) -> None:
        raise MemoryError

    case.options = {"on_build": build}
    with pytest.raises(EngineError, match="the default settings do not work: memory ran out"):
        case.run()
    assert not case.output.exists()


class Stopped(BaseException):
    """Stands for whatever ends a process that may still clean up."""


def stop_at(number: int, stop: Any) -> Any:
    """A hook that stops the search when it builds its engine of this number, from 1."""
    counted = 0

    def build(_settings: Mapping[str, object]) -> None:
        nonlocal counted
        counted += 1
        if counted == number:
            stop()

    return build


def test_a_signal_ends_with_what_is_known_and_a_second_search_goes_on(case: Case) -> None:
    case.options = {"on_build": stop_at(5, lambda: os.kill(os.getpid(), signal.SIGTERM))}
    stopped = case.run()
    assert (stopped.exit_code, stopped.reason, stopped.num_trials) == (75, "SIGTERM", 3)
    assert "The search was stopped before its end." in case.output.read_text()
    assert len(case.lines("trial")) == 3
    case.options = {}
    built = case.num_built
    done = case.run()
    assert done.reason is None
    assert done.findings is not None
    assert done.findings.book.trials[:3] == (stopped.findings and stopped.findings.book.trials[:3])
    assert case.num_built - built == len(done.findings.book.trials) - 3  # none of the three again, nor the lengths
    assert "stopped" not in case.output.read_text()
    assert not case.path.joinpath("tuned.toml.lock").exists()


def test_a_signal_before_the_first_trial_leaves_nothing(case: Case) -> None:
    case.options = {"on_build": stop_at(1, lambda: os.kill(os.getpid(), signal.SIGINT))}
    summary = case.run(interrupted_exit_code=9)
    assert (summary.exit_code, summary.findings) == (9, None)
    assert not case.output.exists()


def trial_of(line: dict[str, Any]) -> str:
    """What was tried, and what came of it."""
    outcome = line["outcome"]
    return f"{line['trial']} {line['rung']} {outcome['status']} {outcome['output_tokens']} {outcome['timed_s']:.6f}"


@pytest.mark.parametrize("at", [1, 2, 4, 9])
def test_a_search_that_died_goes_on_to_the_same_end(tmp_path: Path, at: int) -> None:
    def die() -> None:
        raise Stopped

    cases = []
    for name in ("whole", "twice"):
        (tmp_path / name).mkdir()
        cases.append(Case(tmp_path / name))
    whole, twice = cases
    twice.options = {"on_build": stop_at(at, die)}
    with pytest.raises(Stopped):
        twice.run()
    assert not twice.output.exists()
    twice.options = {}
    whole.run()
    twice.run()
    assert sorted(map(trial_of, twice.lines("trial"))) == sorted(map(trial_of, whole.lines("trial")))
    assert {name: value for name, value in twice.tuned().items() if name in BEST} == {
        name: value for name, value in whole.tuned().items() if name in BEST
    }


def test_a_torn_line_is_left_out(case: Case) -> None:
    case.run(trials=3)
    whole = case.journal.read_bytes()
    count = len(case.lines("trial"))
    case.journal.write_bytes(whole[:-20])
    summary = case.run(trials=3)
    assert summary.findings is not None
    text = case.journal.read_text().splitlines()
    assert len([line for line in text if line.endswith("}") and '"trial"' in line]) == count
    assert case.num_built - len(case.sources[0].engines) == 1


def test_a_finished_search_does_nothing_more(case: Case) -> None:
    first = case.run()
    before, journal = case.tuned(), case.journal.read_bytes()
    again = case.run()
    assert again.findings is not None
    assert first.findings is not None
    assert again.findings.verdict == first.findings.verdict
    assert case.sources[1].engines == []
    assert case.journal.read_bytes() == journal
    before["evidence"].pop("written_at")
    after = case.tuned()
    after["evidence"].pop("written_at")
    assert after == before


def test_more_trials_go_on_from_the_old_ones(case: Case) -> None:
    case.run(trials=3)
    built = case.num_built
    summary = case.run(trials=6)
    assert summary.findings is not None
    assert len(summary.findings.book.points) == 6
    assert len([line for line in case.lines("trial") if line["rung"] == 0]) == 6 + 1
    assert case.num_built > built


@pytest.mark.parametrize("change", ["input", "options", "model", "restart"])
def test_trials_of_other_work_are_not_taken(case: Case, change: str) -> None:
    case.run(trials=3)
    count = len(case.lines("trial"))
    options: dict[str, Any] = {}
    if change == "input":
        case.write(rows(25))
    elif change == "options":
        options["scheduler_type"] = "prefill_first"
    elif change == "model":
        (case.path / "model" / "config.json").write_text('{"other": 1}')
    else:
        options["restart"] = True
    case.run(trials=3, **options)
    assert len(case.sources[1].engines) > 3
    assert (len(case.lines("trial")) > count) == (change != "restart")
    keys = {line["key"] for line in case.lines("trial")}
    assert len(keys) == (1 if change == "restart" else 2)


def test_a_trial_in_which_processes_die_is_not_tried_for_ever(case: Case) -> None:
    case.run(trials=3)
    victim = case.lines("trial")[-1]
    kept = [line for line in case.journal.read_text().splitlines() if '"trial"' not in line or '"default"' in line]
    starts = [line for line in kept if '"starts"' in line]
    point = victim["trial"]
    mine = [line for line in starts if has_started(json.loads(line), point, victim["rung"])]
    assert mine
    case.journal.write_text("\n".join([*[line for line in kept if '"starts"' not in line], *mine[:1] * 2]) + "\n")
    summary = case.run(trials=3)
    assert summary.findings is not None
    reasons = [t.outcome.reason for t in summary.findings.book.trials if not t.outcome.ok]
    assert set(reasons) == {DIED}


def has_started(line: dict[str, Any], settings: dict[str, Any], rung: int) -> bool:
    """Whether a line of the journal says that a trial of these settings began."""
    return (line.get("starts"), line.get("rung")) == (settings, rung)


def test_rows_that_cannot_run_are_left_out(case: Case) -> None:
    case.write([*rows(9), {"prompt": ""}, {"prompt": "x" * 9000}, "no json"])
    summary = case.run(trials=2)
    assert summary.findings is not None
    sample = summary.findings.sample
    assert len(sample.prompts) == 9
    assert sample.num_failed == 1  # the others were never picked
    assert sample.first_error is not None
    assert "do not fit the context" in sample.first_error
    assert case.tuned()["evidence"]["sample"]["rows_left_out"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the input has no rows"),
        (["broken", {"prompt": ""}], r"no row of the input can run; the first: .*in\.jsonl:1: not JSON"),
        ([{"prompt": "hello"}], "the input has only one row that can run"),
        ([{"prompt": "x" * 9000}, {"prompt": "y" * 9000}], "no row of the input can run; .*do not fit the context"),
    ],
)
def test_an_input_that_makes_no_batch_is_told(case: Case, given: list[Any], message: str) -> None:
    case.write(given)
    with pytest.raises(InputError, match=message):
        case.run()
    assert not case.output.exists()


def test_what_can_be_checked_is_checked_before_the_model_loads(case: Case, tmp_path: Path) -> None:
    for options, message in (
        ({"budget": "10"}, "--budget must be a duration"),
        ({"budget": "soon"}, "--budget must be a duration"),
        ({"search": ("pages",)}, "--search must be one of"),
        ({"page_size": 8, "max_batch_tokens": 64}, "nothing is left to search"),
        ({"output": str(tmp_path / "out.jsonl")}, r"the output of tune is a \.toml file"),
        ({"output": str(tmp_path / "gone" / "tuned.toml")}, "does not exist"),
        ({"template": "{{"}, "no Jinja template"),
    ):
        with pytest.raises(UsageError, match=message):
            case.run(**options)
    assert case.sources == []


def test_a_file_that_no_search_wrote_is_not_replaced(case: Case) -> None:
    case.output.write_text("page_size = 4\n")
    with pytest.raises(UsageError, match="exists, and no search has written it"):
        case.run()
    assert case.run(restart=True).reason is None
    assert case.run().reason is None


def test_a_missing_package_gives_the_line_that_installs_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.tune.propose.PACKAGES", ("no_such_package",))
    with pytest.raises(UsageError, match=r"pip install 'cbatch\[tune\]'"):
        case.run()


def test_a_budget_decides_how_large_the_sample_is(tmp_path: Path) -> None:
    sizes = []
    for budget in ("5s", "100s"):
        (folder := tmp_path / budget).mkdir()
        case = Case(folder, *rows(60, max_tokens=40, ignore_eos=True))
        case.options = {"default": replace(TunePlan(), max_requests_per_batch=32)}
        summary = case.run(trials=2, budget=budget)
        assert summary.findings is not None
        sizes.append(len(summary.findings.sample.prompts))
    assert sizes[0] < sizes[1] == 60
