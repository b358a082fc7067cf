"""From what was given on the command line and in a TOML file to the configurations of a run. Used by `run`.

Leaves out whether the values work with the model and the input at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbatch.cli.config_file import INPUTS, read_config_file
from cbatch.cli.options import ALIASES, BY_NAME
from cbatch.cli.setting import ConsoleConfig
from cbatch.config import EngineConfig, JobConfig, SamplingParams
from cbatch.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that one `cbatch run` was asked for."""

    engine: EngineConfig
    job: JobConfig
    console: ConsoleConfig


def read_options(inputs: list[str], config: str | None, given: dict[str, Any]) -> RunOptions:
    """Check what was given, the command line over the TOML file, and build the configurations.

    `given` maps parameter names to text, lists of text or booleans; None stands for what was not given.
    """
    values: dict[str, Any] = read_config_file(config) if config else {}
    values |= _command_line(given)
    if inputs:
        values[INPUTS] = tuple(inputs)
    for name, hint in (
        (INPUTS, "cbatch run FILE... --model MODEL -o OUT.jsonl"),
        ("model", "--model FOLDER, FILE.gguf or a hub repository"),
        ("output", "-o OUT.jsonl or OUT.parquet"),
    ):
        if name not in values:
            raise UsageError(f"no {name.removesuffix('s')} given", hint=hint)
    return RunOptions(
        engine=EngineConfig(**_of(EngineConfig, values)),
        job=JobConfig(inputs=values[INPUTS], sampling=_of(SamplingParams, values), **_of(JobConfig, values)),
        console=ConsoleConfig(**_of(ConsoleConfig, values)),
    )


def _command_line(given: dict[str, Any]) -> dict[str, Any]:
    """Convert and check what the command line gave, under the settings' own names."""
    values: dict[str, Any] = {}
    for word, value in given.items():
        if value is None or value == []:
            continue
        setting = BY_NAME.get(word) or ALIASES[word]
        if setting.name in values:
            other = "--" + word.replace("_", "-")
            raise UsageError(f"{setting.option} is given twice", hint=f"{other} is another word for it")
        is_text = isinstance(value, str | list)
        values[setting.name] = setting.from_text(value) if is_text else setting.check(value, setting.option)
    return values


def _of(target: type, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in BY_NAME and BY_NAME[name].target is target}
