"""The file that a search writes: settings for `cbatch run --config`, and in a table of their own the evidence for them.

It holds what was given to the search (`run` needs the same model, templates and so on) and the searched settings where
they beat the default; where nothing did, they are left out, and `run` decides as it did here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cbatch.errors import UsageError
from cbatch.io import atomic
from cbatch.io.atomic import AtomicFile
from cbatch.jobs.report import environment
from cbatch.tune.evidence import OUTPUT_LENGTH, PROMPT_LENGTH, TABLE
from cbatch.tune.findings import Findings, Line
from cbatch.tune.sample import count_runs

SUFFIX = ".toml"
COMMENT_WIDTH = 118


def check_target(path: Path, others: Mapping[str, str], *, replace: bool) -> None:
    """Check, by trial, that the file can be written, and replaces none but an earlier search's.

    `others` are names of files and what they are. Raises UsageError, OutputError.
    """
    if path.suffix.lower() != SUFFIX:
        raise UsageError(f"the output of tune is a {SUFFIX} file, and {path} is none", hint="--output tuned.toml")
    atomic.check_target(path, others)
    if path.exists() and not replace and TABLE not in _read(path):
        raise UsageError(
            f"{path} exists, and no search has written it", hint="name another --output, or --restart to replace it"
        )


def write_tuned(
    path: Path, given: Mapping[str, Any], findings: Findings, circumstances: Mapping[str, Any], *, is_whole: bool
) -> None:
    """Write the file; it appears complete. `given` are settings of `run` by name. Raises OutputError."""
    import tomli_w

    settings = {name: _plain(value) for name, value in given.items() if value is not None}
    settings |= findings.space.settings(findings.verdict.point)
    flat = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    head = ["Written by cbatch tune, for cbatch run --config.", findings.conclusion() + "."]
    if not is_whole:
        head.append("The search was stopped before its end.")
    evidence = {TABLE: make_evidence(findings, circumstances)}
    text = "".join(f"# {line}\n" for words in head for line in _wrap(words))
    text += "\n" + tomli_w.dumps(flat | tables | evidence)
    with AtomicFile(path) as file:
        file.file.write(text.encode())
        file.commit()


def make_evidence(findings: Findings, circumstances: Mapping[str, Any]) -> dict[str, Any]:
    """Say what was measured, when, on what, and what came of it."""
    sample, verdict = findings.sample, findings.verdict
    evidence: dict[str, Any] = {
        "conclusion": findings.conclusion(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "unit": findings.unit,
        "noise": _short(verdict.noise),
    }
    if verdict.gain is not None:
        evidence |= {"gain": _short(verdict.gain.ratio), "gain_noise": _short(verdict.gain.margin)}
    evidence |= {name: value for name, value in circumstances.items() if name != "sample"}
    evidence["versions"] = environment()["versions"]
    rows = len(sample.prompts)
    evidence["sample"] = {
        **circumstances.get("sample", {}),
        "rows": rows,
        "runs_of_rows": count_runs(sample.rows),
        "rungs": list(sample.rungs),
        "rows_left_out": sample.num_failed,
        "rows_cut": sample.num_cut,
        PROMPT_LENGTH: _short(sample.prompt_tokens / rows),
        OUTPUT_LENGTH: _short(sample.output_tokens / rows),
    }
    evidence["trials"] = [_trial(line) for line in findings.lines()]
    return evidence


def _trial(line: Line) -> dict[str, Any]:
    entry: dict[str, Any] = {**line.settings, "default": line.is_default, "chosen": line.is_chosen}
    if line.failure is not None:
        return entry | {"status": "failed", "reason": line.failure}
    entry |= {"status": "ok", "rows": line.num_rows, "tokens_per_s": _short(line.tokens_per_s)}
    entry["runs"] = [_short(speed) for speed in line.speeds]
    if line.times_default is not None:
        entry["times_default"] = _short(line.times_default)
    return entry | {"memory_bytes": line.memory_bytes}


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """Turn a setting's value into what TOML has; a logit bias is pairs here and a table there."""
    if isinstance(value, tuple) and value and all(isinstance(item, tuple) for item in value):
        return {str(token): bias for token, bias in value}
    return list(value) if isinstance(value, tuple) else value


def _wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(" ".join(text.split()), COMMENT_WIDTH)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
