"""One simulation as a whole: what steps cost, the engine, the workload, and what is compared. Called by `simulate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from cbatch.config import SimulateConfig
from cbatch.engine.modes import CHUNKED, STATIC, parse_modes
from cbatch.errors import InputError, UsageError
from cbatch.jobs.paths import report_path
from cbatch.jobs.report import read_report
from cbatch.simulate.calibration import Calibration, fit_calibration, load_calibration, preset_calibration
from cbatch.simulate.figures import Figures
from cbatch.simulate.lengths import read_lengths, traced_lengths
from cbatch.simulate.presets import PRESETS, Preset
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.shards import ShardedPlan, plan_shards
from cbatch.simulate.simulator import Simulator
from cbatch.simulate.tracefile import TracedSession, find_trace, output_of, read_trace
from cbatch.simulate.workload import MAX_ARRIVAL_S, Lengths, SyntheticWorkload, Workload, arriving

DEFAULT_PRESET = "h100-70b-fp8"
DEFAULT_ROWS, DEFAULT_PROMPTS, DEFAULT_OUTPUTS = 1_000, "64-512", "16-256"
UNPAGED = "static, no pages"
PARALLEL_FROM = 20_000  # requests, from which on another process pays
DRAWN = ("rows", "prompt_tokens", "output_tokens", "shared_prefix")  # settings of a workload that is drawn


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the workload."""

    name: str
    mode: str
    engine: SimulatedEngine

    @property
    def is_as_run(self) -> bool:
        """Whether this is how `cbatch run` batches."""
        return self.mode == CHUNKED


@dataclass(frozen=True, slots=True)
class Comparison:
    """A simulation that can begin."""

    config: SimulateConfig
    calibration: Calibration
    engine: SimulatedEngine
    workload: Workload
    cases: tuple[Case, ...]
    measured_s: float | None  # how long the run really took, where that run is what is simulated
    load_s: float | None  # of the model, where the run that the costs are fitted to says it

    def run(self, case: Case) -> Figures:
        """Simulate one case."""
        simulator = Simulator(case.engine, self.calibration.cost, mode=case.mode)
        config = self.config
        return simulator.run(self.workload, goodput_ttft=config.goodput_ttft, goodput_itl=config.goodput_itl)

    def run_all(self) -> Iterator[tuple[Case, Figures]]:
        """Simulate all cases, in order; long ones at the same time, a process each."""
        workers = min(len(self.cases), os.cpu_count() or 1)
        if workers == 1 or len(self.workload) < PARALLEL_FROM:
            yield from ((case, self.run(case)) for case in self.cases)
            return
        deaf = (signal.SIGINT, signal.SIG_IGN)  # which Ctrl-C sends to all: this process ends the others
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=signal.signal, initargs=deaf) as pool:
            futures = [pool.submit(self.run, case) for case in self.cases]
            try:
                for case, future in zip(self.cases, futures, strict=True):
                    yield case, future.result()
            except BaseException:
                for process in active_children():
                    process.terminate()
                raise

    def plan_shards(self, num_gpus: int) -> ShardedPlan:
        """Simulate the job over several GPUs, in the engine's own mode."""
        return plan_shards(self.engine, self.calibration.cost, self.workload, num_gpus, self.load_s)


def prepare_comparison(config: SimulateConfig, engine_settings: Mapping[str, Any]) -> Comparison:
    """Read and check everything. Raises UsageError, InputError."""
    modes = parse_modes(config.modes)
    given = [name for name in ("preset", "fit", "calibration") if getattr(config, name) is not None]
    if len(given) > 1:
        words = " and ".join(f"--{name}" for name in given)
        raise UsageError(f"{words} both say what steps cost", hint="give one of them")
    sessions = read_trace(find_trace(Path(config.fit))) if config.fit is not None else []
    calibration = _calibration(config, sessions)
    engine = calibration.engine.changed(engine_settings)
    workload = _workload(config, engine, sessions)
    if config.arrivals is not None and len(workload) > config.arrivals * MAX_ARRIVAL_S:
        raise UsageError(
            f"--arrivals {config.arrivals:g} lets {len(workload)} requests take centuries", hint="raise it"
        )
    if not workload.shares:
        engine = replace(engine, allow_block_sharing=False)  # there is nothing to find, and hashes take time
    preset = _preset(config)
    reserved = config.reserve or (preset.reserved_tokens if preset is not None else None)
    cases = [Case(UNPAGED, STATIC, engine.unpaged(reserved))] if reserved is not None else []
    cases += [Case(mode, mode, engine) for mode in modes]
    for case in cases:
        _check_any_fits(case, Simulator(case.engine, calibration.cost, mode=case.mode).most_tokens, workload)
    report = _read_report(config)
    load_s = report.get("load_s")
    is_changed = engine_settings or _is_drawn(config) or config.arrivals is not None or config.lengths is not None
    # A job that was resumed did some of its work twice, and one without a report is not done.
    is_that_run = len(sessions) == 1 and report and not is_changed
    return Comparison(
        config,
        calibration,
        engine,
        workload,
        tuple(cases),
        measured_s=sessions[0].duration_s if is_that_run else None,
        load_s=float(load_s) if isinstance(load_s, int | float) else None,
    )


def _read_report(config: SimulateConfig) -> dict[str, Any]:
    """Read the report beside the trace that costs are fitted to; {} where there is none."""
    return read_report(report_path(output_of(Path(config.fit)))) if config.fit is not None else {}


def _check_any_fits(case: Case, most_tokens: int, workload: Workload) -> None:
    """Refuse a case in which every request would be refused; one that refuses some counts them."""
    if not any(work.num_tokens <= most_tokens for work in workload):
        shortest = min(work.num_tokens for work in workload)
        raise UsageError(
            f"no request can run in '{case.name}': the shortest has {shortest} tokens, its completion included, and a "
            f"request may have {most_tokens}",
            hint=f"raise {'--num-blocks or --max-model-len' if case.engine.has_pages else '--reserve'}, "
            "or take shorter requests",
        )


def _preset(config: SimulateConfig) -> Preset | None:
    if config.fit is not None or config.calibration is not None:
        return None
    return PRESETS.get(config.preset or DEFAULT_PRESET)


def _calibration(config: SimulateConfig, sessions: Sequence[TracedSession]) -> Calibration:
    if config.fit is not None:
        return fit_calibration(sessions, config.fit)
    if config.calibration is not None:
        return load_calibration(Path(config.calibration))
    return preset_calibration(config.preset or DEFAULT_PRESET)


def _is_drawn(config: SimulateConfig) -> bool:
    return any(getattr(config, name) for name in DRAWN)


def _workload(config: SimulateConfig, engine: SimulatedEngine, sessions: Sequence[TracedSession]) -> Workload:
    if config.lengths is None and (not sessions or _is_drawn(config)):
        return _drawn(config, engine)
    if config.lengths is not None and _is_drawn(config):
        name = next(name for name in DRAWN if getattr(config, name))
        raise UsageError(
            f"--{name.replace('_', '-')} draws requests, and --lengths gives them", hint="give one of them"
        )
    given = read_lengths(config.lengths) if config.lengths is not None else traced_lengths(sessions)
    if len(given) == 0:
        raise InputError(f"no request finished in the trace of {config.fit}", hint="trace a longer run")
    return given if config.arrivals is None else arriving(given, config.arrivals, config.seed)


def _drawn(config: SimulateConfig, engine: SimulatedEngine) -> SyntheticWorkload:
    preset, most = _preset(config), engine.max_model_len - 1
    prompts = config.prompt_tokens or (preset.prompt_tokens if preset else DEFAULT_PROMPTS)
    outputs = config.output_tokens or (preset.output_tokens if preset else DEFAULT_OUTPUTS)
    return SyntheticWorkload(
        count=config.rows or (preset.rows if preset else DEFAULT_ROWS),
        prompt_tokens=_lengths(prompts, most, "prompt_tokens", config),
        output_tokens=_lengths(outputs, most, "output_tokens", config),
        shared_prefix=config.shared_prefix,
        rate=config.arrivals,
        seed=config.seed,
    )


def _lengths(text: str, most: int, name: str, config: SimulateConfig) -> Lengths:
    """Read a distribution. Raises UsageError where one that was asked for goes beyond the engine's context."""
    lengths = Lengths.parse(text, most)
    if getattr(config, name) is not None and lengths.longest > most:
        raise UsageError(
            f"--{name.replace('_', '-')} {text} goes beyond the {most} tokens that a context of {most + 1} has for it",
            hint="shorten it, or raise --max-model-len",
        )
    return lengths
