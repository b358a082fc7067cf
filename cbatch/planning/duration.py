"""How long a job will take, from something that was measured: a traced run, a report, a bench, a tuned file.

A trace, or a calibration that `simulate` kept of one, says what a step costs, and the dry run's steps are added up. The
others give one speed, which holds for rows of about the same lengths. Called by `job_plan`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cbatch.engine.modes import CHUNKED
from cbatch.errors import InputError, UsageError
from cbatch.jobs.paths import TRACE_SUFFIX, trace_path
from cbatch.simulate import calibration
from cbatch.simulate.cost import CostModel
from cbatch.simulate.tracefile import find_trace, read_trace

HINT = "it takes the output of a finished run, its report.json or trace, a file of simulate, bench or tune"
OTHER_LENGTH = 2.0  # so many times longer or shorter, rows are other work
FACTS = ("model", "dtype", "device")
REPORT_SUFFIX = ".report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What is known of speed: the cost of steps, or tokens a second."""

    source: str  # in words
    cost: CostModel | None = None
    tokens_per_s: float | None = None
    counts_cached: bool = False  # whether prompt tokens that were found in the cache are among these
    load_s: float | None = None
    facts: Mapping[str, object]  # of `FACTS`, those that are known
    mean_prompt: float | None = None  # tokens
    mean_output: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a job has to compute, every completion as long as it may be."""

    rows: int
    prompt_tokens: int
    computed_tokens: float  # of prompts and outputs, those left out that the cache has
    output_tokens: int
    step_s: float | None  # what its steps cost, where the cost of steps is known


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a job takes at most, loading aside, and what that rests on."""

    generate_s: float
    load_s: float | None
    source: str
    doubts: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return {
            "generate_s": self.generate_s,
            "load_s": self.load_s,
            "source": self.source,
            "doubts": list(self.doubts),
        }


def estimate(rates: Rates, work: Work, facts: Mapping[str, object]) -> Estimate:
    """Estimate a job's duration; `facts` are of the model that will run it."""
    if rates.cost is not None and work.step_s is not None:
        seconds = work.step_s
    else:
        assert rates.tokens_per_s is not None
        counted = work.prompt_tokens + work.output_tokens if rates.counts_cached else work.computed_tokens
        seconds = counted / rates.tokens_per_s
    doubts = [
        f"{name} was {rates.facts[name]} there and is {value} here"
        for name, value in facts.items()
        if rates.facts.get(name) not in (None, value)
    ]
    rows = max(1, work.rows)
    if rates.cost is None:
        doubts += _other_lengths("prompts", rates.mean_prompt, work.prompt_tokens / rows)
        doubts += _other_lengths("outputs", rates.mean_output, work.output_tokens / rows)
    return Estimate(seconds, rates.load_s, rates.source, tuple(doubts))


def _other_lengths(what: str, there: float | None, here: float) -> list[str]:
    if not there or not here or 1 / OTHER_LENGTH <= here / there <= OTHER_LENGTH:
        return []
    return [f"{what} had {there:.0f} tokens there and have up to {here:.0f} here"]


def load_rates(name: str) -> Rates:
    """Read a file that something was measured into. Raises InputError, UsageError."""
    path = Path(name)
    if not path.is_file():
        raise InputError(f"there is no file {name} to calibrate by", hint=HINT)
    if path.suffix == ".toml":
        return _from_tuned(path)
    if path.name.endswith(TRACE_SUFFIX) or trace_path(path).is_file():
        return _from_trace(path)
    report = path.with_name(path.name + REPORT_SUFFIX)
    if report.is_file():
        return _from_report(report, _read_json(report))
    table = _read_json(path)
    if table.get("kind") == calibration.KIND:
        kept = calibration.load_calibration(path)
        return Rates(source=f"{path} ({kept.source})", cost=kept.cost, facts={})
    if table.get("kind") == "bench":
        return _from_bench(path, table)
    return _from_report(path, table)


def _from_trace(path: Path) -> Rates:
    fitted = calibration.fit_calibration(read_trace(find_trace(path)), str(path))
    return Rates(source=fitted.source, cost=fitted.cost, facts={})


def _from_report(path: Path, report: Mapping[str, Any]) -> Rates:
    try:
        rows, seconds, computed = report["rows_ok"], report["generate_s"], report["computed_tokens"]
        if not (rows > 0 and seconds > 0 and computed > 0):
            raise UsageError(f"the run of {path} generated nothing", hint=HINT)
        settings = report["settings"]
        return Rates(
            source=f"{path}: {computed / seconds:.1f} tokens/s computed, of prompts and outputs",
            tokens_per_s=computed / seconds,
            load_s=report["load_s"],
            facts={"model": report["model"], **{n: settings[n]["value"] for n in ("dtype", "device") if n in settings}},
            mean_prompt=report["prompt_tokens"] / rows,
            mean_output=report["output_tokens"] / rows,
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is no report of a run, and nothing else to calibrate by", hint=HINT) from error


def _from_bench(path: Path, table: Mapping[str, Any]) -> Rates:
    try:
        result, rows = table["results"].get(CHUNKED) or {}, table["rows"]
        figures = result.get("median")
        if figures is None:
            raise UsageError(f"{path} has no figures of {CHUNKED}, as which a job runs", hint=HINT)
        computed = table["prompt_tokens"] - result["cached_tokens"] + table["output_tokens"] - rows
        speed = computed / figures["generate_s"]
        return Rates(
            source=f"{path}: {speed:.1f} tokens/s computed, of prompts and outputs",
            tokens_per_s=speed,
            load_s=figures["load_s"],
            facts={name: table.get(name) for name in FACTS},
            mean_prompt=table["prompt_tokens"] / rows,
            mean_output=table["output_tokens"] / rows,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no output of bench as this version writes it", hint=HINT) from error


def _from_tuned(path: Path) -> Rates:
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        evidence = table["evidence"]
        chosen = next(trial for trial in evidence["trials"] if trial["chosen"])
        prompt, output = (evidence["sample"][f"mean_{what}_tokens"] for what in ("prompt", "output"))
        shown = median(chosen["runs"])
        # Where speeds are of outputs only, the prompts came with them.
        speed = shown if evidence["unit"] != "output tokens/s" else shown * (prompt + output) / output
        machine = evidence.get("machine", {})
        return Rates(
            source=f"{path}: {shown:.1f} {evidence['unit']}",
            tokens_per_s=speed,
            counts_cached=True,
            facts={"model": table.get("model"), **{name: machine.get(name) for name in ("dtype", "device")}},
            mean_prompt=prompt,
            mean_output=output,
        )
    except (OSError, ValueError, KeyError, TypeError, StopIteration, ZeroDivisionError) as error:
        raise UsageError(f"{path} holds no measurement of a search", hint=HINT) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is nothing to calibrate by: it is not JSON", hint=HINT) from error
    if not isinstance(table, dict):
        raise UsageError(f"{path} is nothing to calibrate by", hint=HINT)
    return table
