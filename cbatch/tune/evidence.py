"""What a tuned file says of its making: model, machine and work that it was measured on. Used by `tune` and `run`.

`cbatch run --config tuned.toml` leaves the table aside as settings, and compares it with what it runs: settings that
were measured for short prompts on another machine may be the wrong ones here, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.config import EngineConfig
from cbatch.engine.load import load_engine

if TYPE_CHECKING:
    from cbatch.engine.engine import Engine

TABLE = "evidence"
FACTS = ("device", "dtype", "num_threads")  # of the plan: what decides over speed, and is no searched setting
PROCESSOR = "processor"
MODEL = "model_identity"
PROMPT_LENGTH = "mean_prompt_tokens"
OUTPUT_LENGTH = "mean_output_tokens"
OTHER_LENGTH = 2.0  # so many times longer or shorter, rows are other work
RETUNE = "cbatch tune finds the settings for it"
CPU_INFO = Path("/proc/cpuinfo")


def loading_checked(evidence: Mapping[str, Any], say: Callable[[str], None]) -> Callable[[EngineConfig], Engine]:
    """Return what loads an engine for a run, and says where model or machine are not those of the evidence, if any."""
    if not evidence:
        return load_engine

    def load(config: EngineConfig) -> Engine:
        from cbatch.jobs.identity import identify_model

        engine = load_engine(config)
        note = other_circumstances(evidence, engine.plan.settings(), identify_model(config))
        if note is not None:
            say(note)
        return engine

    return load


def machine_facts(settings: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Say what a plan, given as its `settings()`, computes on."""
    facts = {name: settings[name]["value"] for name in FACTS if name in settings}
    return {PROCESSOR: _processor(str(facts.get("device", "cpu"))), **facts}


def other_circumstances(
    evidence: Mapping[str, Any], settings: Mapping[str, Mapping[str, object]], model: bytes
) -> str | None:
    """Say in what model or machine a run differs from what the settings were measured on; None where in nothing."""
    differences = []
    if evidence.get(MODEL) not in (None, model.hex()):
        differences.append("another model, revision or data type")
    measured = evidence.get("machine", {})
    for name, value in machine_facts(settings).items():
        if measured.get(name) not in (None, value):
            differences.append(f"{name} {value} instead of {measured[name]}")
    if not differences:
        return None
    return f"the settings were tuned for other circumstances: {', '.join(differences)}; {RETUNE}"


def other_work(evidence: Mapping[str, Any], report: Mapping[str, Any]) -> str | None:
    """Say how the rows of a finished run, given its report, differ in length from those measured; None where little."""
    rows = report.get("rows_ok") or 0
    differences = []
    for name, words in ((PROMPT_LENGTH, "prompt"), (OUTPUT_LENGTH, "output")):
        measured, total = evidence.get("sample", {}).get(name), report.get(f"{words}_tokens", 0)
        if not measured or not rows or not total:
            continue
        times = total / rows / measured
        if not 1 / OTHER_LENGTH <= times <= OTHER_LENGTH:
            differences.append(f"{words}s of {total / rows:.0f} tokens instead of {measured:.0f}")
    return f"the settings were tuned for other rows: {', '.join(differences)}; {RETUNE}" if differences else None


def _processor(device: str) -> str:
    """Name what computes, as far as the system says."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, "unknown")
