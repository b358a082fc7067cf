"""From what the user names to the situation that the rules look at: a finished run, a configuration, or vLLM's.

Called by `diagnose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cbatch.diagnose.findings import Finding
from cbatch.diagnose.observed import from_series, from_sessions, observe
from cbatch.diagnose.prefixes import shared_share
from cbatch.diagnose.situation import Facts, Situation
from cbatch.diagnose.vllm import OPTIONS, VllmCommand
from cbatch.engine.modes import CHUNKED, CONTINUOUS, STATIC
from cbatch.errors import InputError
from cbatch.jobs.paths import report_path, trace_path
from cbatch.jobs.report import read_report
from cbatch.simulate.calibration import Calibration
from cbatch.simulate.fit import MIN_STEPS, fit_cost
from cbatch.simulate.lengths import traced_lengths
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.tracefile import ENGINE_SETTINGS, TracedSession, read_trace
from cbatch.simulate.workload import Workload

UNFILLED = 0.2  # share of the time from which on a batch is taken not to be refilled


def of_run(output: Path) -> tuple[Situation, str]:
    """Look at a finished run: its report, and its trace where there is one. Returns what that was, in words.

    Raises InputError where there is no report.
    """
    report = read_report(report_path(output))
    if not report:
        raise InputError(
            f"there is no report of {output} at {report_path(output)}",
            hint="name the output of a finished cbatch run, a TOML file of settings, or a vllm command line",
        )
    sessions = read_trace(trace_path(output)) if trace_path(output).is_file() else []
    engine = sessions[-1].engine() if sessions else _reported_engine(report, output)
    situation = Situation(
        engine=engine,
        facts=_facts(report),
        shared_share=0.0 if engine.allow_block_sharing else shared_share(report.get("inputs") or ()),
        speculation=_setting(report, "speculation"),
    )
    words = f"the report of {output}"
    if sessions:
        words = _take_trace(situation, sessions, output)
    elif (steps := from_series(report.get("series") or {}, situation.facts.generate_s)) is not None:
        situation.observed = observe(steps, engine)
    return situation, words


def _take_trace(situation: Situation, sessions: Sequence[TracedSession], output: Path) -> str:
    """Let a situation know what a trace shows; return what it was, in words."""
    observed = situation.observed = observe(from_sessions(sessions), situation.engine)
    if observed.whole_prompts > 0:
        situation.mode = STATIC if observed.unfilled > UNFILLED else CONTINUOUS
    elif observed.unfilled > UNFILLED:
        situation.mode = STATIC
    situation.workload = traced_lengths(sessions)
    if sum(session.num_steps for session in sessions) < MIN_STEPS:
        return f"the report and the trace of {output}, too short to predict from"
    fit = fit_cost(sessions)
    situation.cost = fit.cost
    way = "" if situation.mode == CHUNKED else f", whose batches look {situation.mode}"
    return f"the report and the trace of {output}{way}; costs {fit.describe()}"


def _facts(report: dict[str, Any]) -> Facts:
    def number(name: str) -> float:
        value = report.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    steps = number("steps")
    return Facts(
        generate_s=number("generate_s"),
        idle_s=number("idle_s"),
        starved_share=number("starved_steps") / steps if steps else 0.0,
        output_wait_s=number("output_wait_s"),
        preemptions=int(number("preemptions")),
        recomputed_tokens=int(number("recomputed_tokens")),
        computed_tokens=int(number("computed_tokens")),
        drafted_tokens=int(number("drafted_tokens")),
        accepted_tokens=int(number("accepted_tokens")),
    )


def _setting(report: dict[str, Any], name: str) -> Any:
    setting = (report.get("settings") or {}).get(name)
    return setting.get("value") if isinstance(setting, dict) else None


def _reported_engine(report: dict[str, Any], output: Path) -> SimulatedEngine:
    values = {name: _setting(report, name) for name in ENGINE_SETTINGS}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise InputError(f"the report of {output} does not say what {missing[0]} was", hint="run the job again")
    return SimulatedEngine(**values)


def of_settings(
    calibration: Calibration, values: Mapping[str, Any], workload: Workload, inputs: Sequence[str] = ()
) -> Situation:
    """Look at a configuration of ours by simulating it: `values` are its settings, `inputs` what it would read."""
    engine = calibration.engine.changed(values)
    situation = Situation(
        engine=engine,
        cost=calibration.cost,
        workload=workload,
        shared_share=0.0 if engine.allow_block_sharing else shared_share(inputs),
        speculation=0 if values.get("speculation") is False else None,
    )
    return _simulated(situation)


def of_vllm(
    calibration: Calibration, command: VllmCommand, workload: Workload, inputs: Sequence[str] = ()
) -> tuple[Situation, list[Finding]]:
    """Look at a vLLM command line by simulating it; returns what can be said without that as well."""
    engine = calibration.engine.changed(command.engine)
    situation = Situation(
        engine=engine,
        cost=calibration.cost,
        workload=workload,
        mode=CONTINUOUS if command.features.chunked_prefill is False else CHUNKED,
        shared_share=0.0 if engine.allow_block_sharing else shared_share(inputs),
        speculation=None if command.features.speculation else 0,
        options=OPTIONS,
    )
    findings = []
    if command.features.multi_step:
        findings.append(
            Finding(
                cause="continuous batching",
                evidence=f"the batch is refilled every {command.scheduler_steps} steps only",
                advice="leave --num-scheduler-steps out; newer versions have no such option and refill at every step",
                assumption="how much it would gain is not simulated",
            )
        )
    return _simulated(situation), findings


def _simulated(situation: Situation) -> Situation:
    """Let a situation without a run know what a simulated one shows."""
    situation.watch()
    figures = situation.predict()
    situation.facts = Facts(
        preemptions=figures.preemptions,
        recomputed_tokens=figures.recomputed_tokens,
        computed_tokens=figures.computed_tokens,
    )
    return situation
