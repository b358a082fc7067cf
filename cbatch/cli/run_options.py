"""From what was given on the command line and in a TOML file to the configurations of a command.

Used by `run` and by the commands that take a part of its settings. Leaves out whether the values work with the model
and the input at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.cli.config_file import INPUTS, read_config_file
from cbatch.cli.options import BY_NAME, SETTINGS
from cbatch.cli.setting import ConsoleConfig, Setting
from cbatch.config import EngineConfig, JobConfig, SamplingParams
from cbatch.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that one `cbatch run` was asked for."""

    engine: EngineConfig
    job: JobConfig
    console: ConsoleConfig


@dataclass(frozen=True, slots=True)
class Given:
    """What a command was given, checked, by the names of its settings."""

    inputs: tuple[str, ...]
    values: dict[str, Any]
    settings: Sequence[Setting]

    def of(self, target: type) -> dict[str, Any]:
        """Give what was given for the fields of `target`."""
        names = (setting.name for setting in self.settings if setting.target is target)
        return {name: self.values[name] for name in names if name in self.values}


def read_given(inputs: list[str], config: str | None, given: dict[str, Any], settings: Sequence[Setting]) -> Given:
    """Check what was given for `settings`, the command line over a TOML file of `run`, whose others are left alone.

    `given` maps parameter names to text, lists of text or booleans; None stands for what was not given.
    """
    in_file = read_config_file(config) if config else {}
    found: Any = tuple(inputs) or in_file.pop(INPUTS, ())
    values = {name: value for name, value in in_file.items() if BY_NAME.get(name) in settings}
    return Given(found, values | _command_line(given, settings), settings)


def read_options(inputs: list[str], config: str | None, given: dict[str, Any]) -> RunOptions:
    """Check what `run` was given and build its configurations."""
    found = read_given(inputs, config, given, SETTINGS)
    check_present(found, "run", output="-o OUT.jsonl or OUT.parquet")
    return RunOptions(
        engine=EngineConfig(**found.of(EngineConfig)),
        job=JobConfig(inputs=found.inputs, sampling=found.of(SamplingParams), **found.of(JobConfig)),
        console=ConsoleConfig(**found.of(ConsoleConfig)),
    )


def check_present(found: Given, command: str, **others: str) -> None:
    """Raise UsageError, with a hint, where input or model are not given, or one of the `others`."""
    if not found.inputs:
        usage = "-o OUT.jsonl" if "output" in others else ""
        raise UsageError("no input given", hint=f"cbatch {command} FILE... --model MODEL {usage}".rstrip())
    for name, hint in {"model": "--model FOLDER, FILE.gguf or a hub repository", **others}.items():
        if name not in found.values:
            raise UsageError(f"no {name} given", hint=hint)


def _command_line(given: dict[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """Convert and check what the command line gave, under the settings' own names."""
    by_word = {word: setting for setting in settings for word in (setting.name, *setting.aliases)}
    values: dict[str, Any] = {}
    for word, value in given.items():
        if value is None or value == []:
            continue
        setting = by_word[word]
        if setting.name in values:
            other = "--" + word.replace("_", "-")
            raise UsageError(f"{setting.option} is given twice", hint=f"{other} is another word for it")
        is_text = isinstance(value, str | list)
        values[setting.name] = setting.from_text(value) if is_text else setting.check(value, setting.option)
    return values
