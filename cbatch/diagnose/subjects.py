"""From what the user names to the situation that the rules look at: a finished run, a configuration, or vLLM's.

Called by `diagnose`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cbatch.diagnose.findings import Finding
from cbatch.diagnose.observed import from_series, from_sessions
from cbatch.diagnose.prefixes import likeness
from cbatch.diagnose.situation import Facts, Situation
from cbatch.diagnose.vllm import OPTIONS, VllmCommand
from cbatch.engine.modes import CHUNKED, CONTINUOUS
from cbatch.errors import InputError
from cbatch.jobs.paths import report_path, trace_path
from cbatch.jobs.report import read_report
from cbatch.simulate.calibration import Calibration
from cbatch.simulate.fit import MIN_STEPS, fit_cost
from cbatch.simulate.lengths import traced_lengths
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.tracefile import ENGINE_SETTINGS, TracedSession, read_trace
from cbatch.simulate.workload import Workload

SHARING, BLOCKS, SPECULATION = "allow_block_sharing", "num_blocks", "speculation"
GIVEN = "given"  # how the reason of a setting that was asked for begins
TOO_SHORT = "how much it would gain cannot be said: the trace is too short"
NOTHING_GENERATED = (
    "how much it would gain cannot be said: nothing was generated, and what only scores is not simulated"
)
NO_COST = "how much it would gain cannot be said: the steps of the trace do not tell what they cost"
OWN_DRAFTS = {"speculation": "--speculation"}  # where its being off was not asked for


def of_run(output: Path) -> tuple[Situation, str]:
    """Look at a finished run: its report, and its trace where there is one. Returns what that was, in words.

    Raises InputError where there is no report, or that of a merged job.
    """
    report = read_report(report_path(output))
    if not report:
        raise InputError(
            f"there is no report of {output} that can be read at {report_path(output)}",
            hint="name the output of a finished cbatch run, a TOML file of settings, or a vllm command line",
        )
    if "parts" in report:
        raise InputError(
            f"{output} is merged, and its report says nothing of the steps that its parts took",
            hint="name a part, where these are still there, or run one shard on its own",
        )
    sessions, problem = _trace_of(output)
    situation = Situation(
        engine=sessions[-1].engine() if sessions else _reported_engine(report, output),
        facts=_facts(report),
        mode=sessions[-1].mode if sessions else CHUNKED,
        speculation=_setting(report, SPECULATION),
        options={} if _is_given(report, SPECULATION) else OWN_DRAFTS,
        has_given_blocks=_is_given(report, BLOCKS),
        notes=[problem] if problem else [],
    )
    if not situation.engine.allow_block_sharing and _is_given(report, SHARING):
        _look_at_prompts(situation, report.get("inputs") or (), report.get("prompt") or {})
    words = f"the report of {output}"
    if sessions:
        words = _take_trace(situation, sessions, report, output)
    elif (steps := from_series(report.get("series") or {}, situation.facts.generate_s)) is not None:
        situation.look_at(steps)
    else:
        situation.unseen = "how it was batched, as its report says of no step"
    if _session(report).get("number", 1) > 1:
        situation.notes.append(
            "a resumed job: what is said of input, output, drafts and requests moved out is said of its last session"
        )
    return situation, words


def _trace_of(output: Path) -> tuple[list[TracedSession], str]:
    """Read the sessions of a trace that ran as the last one did; and say what is left out."""
    path = trace_path(output)
    if not path.is_file():
        return [], ""
    try:
        sessions = read_trace(path)
        last = sessions[-1]
        alike = [session for session in sessions if (session.engine(), session.mode) == (last.engine(), last.mode)]
    except InputError as error:
        return [], f"the trace is left out: {error}"
    others = len(sessions) - len(alike)
    return alike, f"{others} of the {len(sessions)} sessions had other settings, and are left out" if others else ""


def _take_trace(
    situation: Situation, sessions: Sequence[TracedSession], report: Mapping[str, Any], output: Path
) -> str:
    """Let a situation know what a trace shows; return what it was, in words."""
    situation.look_at(from_sessions(sessions))
    workload = traced_lengths(sessions)
    num_scored = _number(report, "rows_ok") - (report.get("latency") or {}).get("ttft_s", {}).get("count", math.inf)
    if num_scored > 0:
        situation.notes.append(f"{num_scored:.0f} rows generated nothing: what only scores is not simulated")
    if not len(workload):
        situation.unpredictable = NOTHING_GENERATED
        return f"the report and the trace of {output}"
    situation.workload = workload
    if sum(session.num_steps for session in sessions) < MIN_STEPS:
        situation.unpredictable = TOO_SHORT
        return f"the report and the trace of {output}, too short to predict from"
    if len(sessions) == 1 and num_scored <= 0:
        situation.measured_s = sessions[0].duration_s
    fit = fit_cost(sessions)
    situation.cost = fit.cost
    if situation.predict().duration_s <= 0:
        situation.cost, situation.unpredictable = None, NO_COST
    way = "" if situation.mode == CHUNKED else f", batched {situation.mode}"
    return f"the report and the trace of {output}{way}; costs {fit.describe()}"


def _look_at_prompts(situation: Situation, inputs: Sequence[str], settings: Mapping[str, Any]) -> None:
    """See what prompts have in common, where sharing it was forbidden."""
    found = likeness(inputs, settings)
    situation.shared_share = found.share
    situation.notes += [found.unseen] if found.unseen else []


def _session(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a report says of its last session; {} in reports that say nothing of sessions."""
    session = report.get("session")
    return session if isinstance(session, dict) else {}


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _facts(report: Mapping[str, Any]) -> Facts:
    steps = _number(report, "steps")
    again, once = _number(report, "recomputed_tokens"), _number(report, "computed_tokens")
    return Facts(
        generate_s=_number(_session(report) or report, "generate_s"),
        idle_s=_number(report, "idle_s"),
        starved_share=_number(report, "starved_steps") / steps if steps else 0.0,
        output_wait_s=_number(report, "output_wait_s"),
        preemptions=int(_number(report, "offloads") + _number(report, "soft_resets")),
        recomputed_share=again / (once + again) if again else 0.0,
        drafted_tokens=int(_number(report, "drafted_tokens")),
        accepted_tokens=int(_number(report, "accepted_tokens")),
    )


def _setting(report: Mapping[str, Any], name: str, key: str = "value") -> Any:
    setting = (report.get("settings") or {}).get(name)
    return setting.get(key) if isinstance(setting, dict) else None


def _is_given(report: Mapping[str, Any], name: str) -> bool:
    """Whether a setting was asked for, as its reason says."""
    return str(_setting(report, name, "reason")).startswith(GIVEN)


def _reported_engine(report: Mapping[str, Any], output: Path) -> SimulatedEngine:
    values = {name: _setting(report, name) for name in ENGINE_SETTINGS}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise InputError(f"the report of {output} does not say what {missing[0]} was", hint="run the job again")
    return SimulatedEngine(**values)


def of_settings(
    calibration: Calibration,
    values: Mapping[str, Any],
    workload: Workload,
    inputs: Sequence[str] = (),
    *,
    can_share: bool = True,
) -> Situation:
    """Look at a configuration of ours by simulating it: `values` are its settings, `inputs` what it would read.

    `can_share` says whether the model lets requests share blocks.
    """
    situation = Situation(
        engine=calibration.engine.changed(values),
        cost=calibration.cost,
        workload=workload,
        speculation=0 if values.get(SPECULATION) is False else None,
        has_given_blocks=BLOCKS in values,
    )
    if values.get(SHARING) is False and can_share:
        _look_at_prompts(situation, inputs, values)
    return _simulated(situation)


def of_vllm(
    calibration: Calibration, command: VllmCommand, workload: Workload, inputs: Sequence[str] = ()
) -> tuple[Situation, list[Finding]]:
    """Look at a vLLM command line by simulating it; returns what can be said without that as well."""
    situation = Situation(
        engine=calibration.engine.changed(command.engine),
        cost=calibration.cost,
        workload=workload,
        mode=CONTINUOUS if command.features.chunked_prefill is False else CHUNKED,
        speculation=None if command.features.speculation else 0,
        options=OPTIONS,
        has_given_blocks=command.engine[BLOCKS] is not None,
    )
    if command.engine[SHARING] is False:
        _look_at_prompts(situation, inputs, {})
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
    figures = situation.predict()
    num_works, longest = len(situation.sample), situation.engine.max_model_len
    if figures.refused:
        situation.notes.append(
            f"{figures.refused} of {num_works} simulated requests are left out: they do not fit into the cache, or "
            f"into max_model_len {longest}"
        )
    if figures.refused == num_works:
        situation.unseen = "how it would be batched, as no request fits"
    situation.watch()
    again, once = figures.recomputed_tokens, figures.computed_tokens
    situation.facts = Facts(preemptions=figures.preemptions, recomputed_share=again / (once + again) if again else 0.0)
    return situation
