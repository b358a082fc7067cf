"""A diagnosis as a whole: what is looked at, what was found, what the predictions rest on. Called by `diagnose`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cbatch.compatibility import EXCLUSIONS, Facts
from cbatch.config import DiagnoseConfig, EngineConfig
from cbatch.diagnose.findings import Conflict, Diagnosis
from cbatch.diagnose.rules import apply_rules
from cbatch.diagnose.subjects import of_run, of_settings, of_vllm
from cbatch.diagnose.vllm import parse_command, parse_version
from cbatch.errors import CbatchError, UsageError
from cbatch.io.atomic import AtomicFile
from cbatch.simulate.calibration import Calibration, load_calibration, preset_calibration
from cbatch.simulate.comparison import DEFAULT_PRESET
from cbatch.simulate.lengths import read_lengths
from cbatch.simulate.presets import PRESETS
from cbatch.simulate.workload import Lengths, SyntheticWorkload, Workload

ASSUMED = (
    "predictions rest on the preset {preset} and its workload: --calibration (of `cbatch simulate --fit OUT "
    "--save-calibration FILE`) and --lengths make them yours"
)
NO_TRACE = "without a trace nothing can be predicted: run the job with --trace"


def diagnose_run(output: str) -> Diagnosis:
    """Look at a finished run. Raises InputError."""
    situation, subject = of_run(Path(output))
    notes = () if situation.can_predict else (NO_TRACE,)
    return Diagnosis(subject, tuple(apply_rules(situation)), notes=notes)


def diagnose_settings(path: str, values: Mapping[str, Any], config: DiagnoseConfig) -> Diagnosis:
    """Look at the settings that a TOML file gives. Raises UsageError, InputError."""
    calibration, workload, notes = _basis(config)
    inputs = values.get("inputs") or ([config.lengths] if config.lengths is not None else [])
    conflicts, more = _conflicts(values)
    situation = of_settings(calibration, values, workload, inputs)
    return Diagnosis(f"the settings in {path}", tuple(apply_rules(situation)), conflicts, (*more, *notes))


def diagnose_vllm(text: str, config: DiagnoseConfig) -> Diagnosis:
    """Look at a vLLM command line. Raises UsageError, InputError."""
    version = parse_version(config.vllm_version) if config.vllm_version is not None else None
    command = parse_command(text)
    calibration, workload, notes = _basis(config)
    inputs = [config.lengths] if config.lengths is not None else []
    situation, said = of_vllm(calibration, command, workload, inputs)
    if command.ignored:
        notes = (*notes, f"not looked at: {', '.join(command.ignored)}")
    if command.gpu_memory_utilization is not None and command.gpu_memory_utilization < DEFAULT_UTILIZATION:
        low = f"--gpu-memory-utilization is {command.gpu_memory_utilization}, below vLLM's {DEFAULT_UTILIZATION}"
        notes = (*notes, f"{low}: the cache is smaller than what was simulated")
    subject = f"a vllm command line for {command.model or 'a model that it does not name'}"
    findings = (*apply_rules(situation), *said)
    return Diagnosis(subject, findings, tuple(command.conflicts(version)), notes)


DEFAULT_UTILIZATION = 0.9


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """Write everything that was found as JSON. Raises OutputError."""
    with AtomicFile(path) as file:
        file.file.write(json.dumps(asdict(diagnosis), indent=2).encode() + b"\n")
        file.commit()


def _basis(config: DiagnoseConfig) -> tuple[Calibration, Workload, tuple[str, ...]]:
    """Find what steps cost and what comes in, and say what of it is assumed."""
    if config.preset is not None and config.calibration is not None:
        raise UsageError("--preset and --calibration both say what steps cost", hint="give one of them")
    preset = config.preset or DEFAULT_PRESET
    if config.calibration is not None:
        calibration = load_calibration(Path(config.calibration))
    else:
        calibration = preset_calibration(preset)
    known = PRESETS.get(preset, PRESETS[DEFAULT_PRESET])
    most = calibration.engine.max_model_len - 1
    drawn = SyntheticWorkload(
        count=known.rows,
        prompt_tokens=Lengths.parse(known.prompt_tokens, most),
        output_tokens=Lengths.parse(known.output_tokens, most),
    )
    workload = read_lengths(config.lengths) if config.lengths is not None else drawn
    is_assumed = config.calibration is None or config.lengths is None
    return calibration, workload, (ASSUMED.format(preset=preset),) if is_assumed else ()


def _conflicts(values: Mapping[str, Any]) -> tuple[tuple[Conflict, ...], tuple[str, ...]]:
    """List what excludes one another among settings, the model looked at where it can be; and what could not be."""
    facts, notes = _facts(values)
    found = [
        Conflict(f"{exclusion.one} with {exclusion.other}", exclusion.why, exclusion.hint or "it is off by itself")
        for exclusion in EXCLUSIONS
        if exclusion.excludes(facts)
    ]
    return tuple(found), notes


def _facts(values: Mapping[str, Any]) -> tuple[Facts, tuple[str, ...]]:
    output, inputs = str(values.get("output", "")), values.get("inputs") or ()
    device = values.get("device", "auto")
    known: dict[str, Any] = {
        "deterministic": values.get("deterministic") is True,
        "block_sharing": values.get("allow_block_sharing") is True,
        "template": "template" in values,
        "prompt_column": "prompt_column" in values,
        "shard": "shard" in values,
        "completion_order": values.get("order") == "completion",
        "device": None if device == "auto" else device,
        "input_once": "-" in inputs,
        "parquet_output": output.endswith(".parquet"),
        "stdout": output == "-",
    }
    if "model" not in values:
        return Facts(**known), ()
    try:
        more = _model_facts(values)
    except CbatchError as error:
        return Facts(**known), (f"the model was not looked at: {error}",)
    return Facts(**known | more), ()


def _model_facts(values: Mapping[str, Any]) -> dict[str, bool]:
    """Look at the model without its weights. Raises CbatchError where that cannot be."""
    from cbatch.models.inspect import inspect_model

    names = ("model", "revision", "trust_remote_code")
    shape = inspect_model(EngineConfig(**{name: values[name] for name in names if name in values}))
    windows: Sequence[int | None] = shape.sliding_windows
    return {"has_experts": shape.has_experts, "has_windows": any(window is not None for window in windows)}
