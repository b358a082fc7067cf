"""A diagnosis as a whole: what is looked at, what was found, what the predictions rest on. Called by `diagnose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cbatch.compatibility import EXCLUSIONS, Facts
from cbatch.config import DiagnoseConfig, EngineConfig
from cbatch.diagnose.findings import Conflict, Diagnosis
from cbatch.diagnose.prefixes import is_batch_file, is_gone_once_read
from cbatch.diagnose.rules import apply_rules
from cbatch.diagnose.subjects import of_run, of_settings, of_vllm
from cbatch.diagnose.vllm import parse_command, parse_version
from cbatch.errors import CbatchError, UsageError
from cbatch.io.atomic import write_json
from cbatch.simulate.calibration import Calibration, load_calibration, preset_calibration
from cbatch.simulate.comparison import DEFAULT_PRESET
from cbatch.simulate.lengths import read_lengths
from cbatch.simulate.presets import PRESETS
from cbatch.simulate.workload import Lengths, SyntheticWorkload, Workload

ASSUMED_COST = (
    "what steps cost is that of the preset {preset}: --calibration (of `cbatch simulate --fit OUT --save-calibration "
    "FILE`) makes it yours"
)
ASSUMED_WORKLOAD = "what comes in is drawn as the preset {preset} says: --lengths makes it yours"


def diagnose_run(output: str) -> Diagnosis:
    """Look at a finished run. Raises InputError."""
    situation, subject = of_run(Path(output))
    notes = [] if situation.can_predict else [situation.unpredictable]
    return Diagnosis(subject, tuple(apply_rules(situation)), notes=(*notes, *situation.notes), unseen=situation.unseen)


def diagnose_settings(path: str, values: Mapping[str, Any], config: DiagnoseConfig) -> Diagnosis:
    """Look at the settings that a TOML file gives. Raises UsageError, InputError."""
    calibration, workload, notes = _basis(config, values)
    inputs = values.get("inputs") or ([config.lengths] if config.lengths is not None else [])
    facts, more = _facts(values)
    situation = of_settings(calibration, values, workload, inputs, can_share=not facts.has_windows)
    findings = tuple(apply_rules(situation))
    notes = (*more, *notes, *situation.notes)
    return Diagnosis(f"the settings in {path}", findings, _conflicts(facts), notes, situation.unseen)


def diagnose_vllm(text: str, config: DiagnoseConfig) -> Diagnosis:
    """Look at a vLLM command line. Raises UsageError, InputError."""
    version = parse_version(config.vllm_version) if config.vllm_version is not None else None
    command = parse_command(text)
    calibration, workload, notes = _basis(config, command.engine)
    inputs = [config.lengths] if config.lengths is not None else []
    situation, said = of_vllm(calibration, command, workload, inputs)
    if command.defaults:
        notes = (*notes, f"taken as vLLM's defaults on a large GPU: {', '.join(command.defaults)}")
    if command.ignored:
        notes = (*notes, f"not looked at: {', '.join(command.ignored)}")
    if command.gpu_memory_utilization is not None and command.gpu_memory_utilization < DEFAULT_UTILIZATION:
        low = f"--gpu-memory-utilization is {command.gpu_memory_utilization}, below vLLM's {DEFAULT_UTILIZATION}"
        notes = (*notes, f"{low}: the cache is smaller than what was simulated")
    subject = f"a vllm command line for {command.model or 'a model that it does not name'}"
    findings = (*apply_rules(situation), *said)
    conflicts = tuple(command.conflicts(version))
    return Diagnosis(subject, findings, conflicts, (*notes, *situation.notes), situation.unseen)


DEFAULT_UTILIZATION = 0.9


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """Write everything that was found as JSON. Raises OutputError."""
    write_json(path, asdict(diagnosis))


def _basis(config: DiagnoseConfig, given: Mapping[str, Any]) -> tuple[Calibration, Workload, tuple[str, ...]]:
    """Find what steps cost and what comes in, and say what of it is assumed; `given` are settings of the engine."""
    if config.preset is not None and config.calibration is not None:
        raise UsageError("--preset and --calibration both say what steps cost", hint="give one of them")
    preset, notes = config.preset or DEFAULT_PRESET, []
    if config.calibration is not None:
        calibration = load_calibration(Path(config.calibration))
    else:
        calibration = preset_calibration(preset)
        notes.append(ASSUMED_COST.format(preset=preset))
    if config.lengths is not None:
        workload: Workload = read_lengths(config.lengths)
    else:
        known = PRESETS[preset]
        most = calibration.engine.max_model_len - 1
        prompts, outputs = (Lengths.parse(text, most) for text in (known.prompt_tokens, known.output_tokens))
        workload = SyntheticWorkload(count=known.rows, prompt_tokens=prompts, output_tokens=outputs)
        notes.append(ASSUMED_WORKLOAD.format(preset=preset))
    own = calibration.engine
    taken = [f"max_model_len {own.max_model_len}"] if given.get("max_model_len") is None else []
    taken += [f"a cache of {own.num_blocks * own.page_size} tokens"] if given.get("num_blocks") is None else []
    if taken:
        notes.append(f"not given, so as in the {'preset' if config.calibration is None else 'calibration'}: ")
        notes[-1] += " and ".join(taken)
    return calibration, workload, tuple(notes)


def _conflicts(facts: Facts) -> tuple[Conflict, ...]:
    """List what excludes one another."""
    return tuple(
        Conflict(f"{exclusion.one} with {exclusion.other}", exclusion.why, exclusion.hint or "it is off by itself")
        for exclusion in EXCLUSIONS
        if exclusion.excludes(facts)
    )


def _facts(values: Mapping[str, Any]) -> tuple[Facts, tuple[str, ...]]:
    """Gather what is known of a run with these settings, its model looked at where it can be; say what could not be."""
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
        "input_once": is_gone_once_read(inputs),
        "openai_batch": is_batch_file(inputs, values),
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
