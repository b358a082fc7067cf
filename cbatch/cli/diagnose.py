"""`cbatch diagnose`: tell what is to be looked at, look at it, say what was found. Called by `app`.

What was found goes to standard output, on what it rests to standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.cli import diagnose_options
from cbatch.cli.config_file import read_config_file
from cbatch.cli.console import say, showing_traceback
from cbatch.cli.run_options import read_given
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import DiagnoseConfig
from cbatch.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from cbatch.diagnose.findings import Diagnosis

TOML = ".toml"
MAX_COMMAND_BYTES = 1 << 16


def diagnose_command(target: str, given: dict[str, Any]) -> int:
    """Look at `target` and return the exit code."""
    found = read_given([], None, given, diagnose_options.SETTINGS)
    console = found.build(ConsoleConfig)
    with showing_traceback(debug=console.debug):
        return _diagnose(target, found.build(DiagnoseConfig), console)


def _diagnose(target: str, config: DiagnoseConfig, console: ConsoleConfig) -> int:
    from cbatch.diagnose.diagnosis import write_diagnosis
    from cbatch.io.atomic import check_target
    from cbatch.jobs.report import files_of_run

    if config.output is not None:
        read = {"what is looked at,": target, "the calibration": config.calibration, "the lengths": config.lengths}
        others = {name: what for what, name in read.items() if name is not None}
        check_target(Path(config.output), others | (files_of_run(target) if _has_report(target) else {}))
    diagnosis = _look_at(target, config)
    if not console.quiet:
        say(f"looked at {diagnosis.subject}")
        for note in diagnosis.notes:
            say(note)
    sys.stdout.write(_text(diagnosis))
    if config.output is not None:
        write_diagnosis(Path(config.output), diagnosis)
    return EXIT_OK


def _look_at(target: str, config: DiagnoseConfig) -> Diagnosis:
    """Tell a finished run, a vLLM command line, given as such or in a file, and a TOML file from one another.

    What has a report beside it is a run, whatever it says.
    """
    from cbatch.diagnose.diagnosis import diagnose_run, diagnose_settings, diagnose_vllm
    from cbatch.diagnose.vllm import is_vllm_command

    if not _has_report(target):
        if is_vllm_command(target):
            return diagnose_vllm(target, config)
        text = None if target.endswith(TOML) else _read_text(Path(target))
        if text is not None and is_vllm_command(text):
            return diagnose_vllm(text, config)
    if config.vllm_version is not None:
        raise UsageError("--vllm-version is for vllm command lines", hint=f"leave it out for {target}")
    if target.endswith(TOML):
        return diagnose_settings(target, read_config_file(target).settings, config)
    given = [name for name in ("calibration", "preset", "lengths") if getattr(config, name) is not None]
    if given:
        raise UsageError(
            f"--{given[0]} is for configurations, and {target} is a run", hint="its own trace says all that"
        )
    return diagnose_run(target)


def _has_report(target: str) -> bool:
    from cbatch.jobs.paths import report_path

    try:
        return report_path(Path(target)).is_file()
    except (OSError, ValueError):  # a command line, which no file can be called
        return False


def _read_text(path: Path) -> str | None:
    """Read the beginning of a text file; None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_COMMAND_BYTES).decode()
    except (OSError, ValueError):
        return None


def _text(diagnosis: Diagnosis) -> str:
    lines: list[str] = []
    for number, finding in enumerate(diagnosis.findings, start=1):
        gain = "" if finding.gain is None else f": {finding.gain:.0%} less time" if finding.gain >= 0.005 else ""
        if finding.itl_factor is not None:
            gain += f"{', ' if gain else ': '}{finding.itl_factor:.1f} times shorter P99 time between tokens"
        lines += [f"{number}. {finding.cause}{gain}{f' ({finding.assumption})' if finding.assumption else ''}"]
        lines += [f"   {finding.evidence}", f"   set: {finding.advice}"]
    if not diagnosis.findings:
        lines += [diagnosis.verdict]
    for conflict in diagnosis.conflicts:
        versions = f" ({conflict.versions})" if conflict.versions else ""
        lines += [f"incompatible: {conflict.settings}{versions}: {conflict.problem}", f"   {conflict.advice}"]
        lines += [f"   see {conflict.source}"] if conflict.source else []
    return "\n".join(lines) + "\n"
