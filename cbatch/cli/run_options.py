"""From what was given on the command line and in a TOML file to the configurations of a command.

Used by `run` and by the commands that take a part of its settings. Leaves out whether the values work with the model
and the input at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cbatch.cli.config_file import INPUTS, ConfigFile, read_config_file
from cbatch.cli.options import BY_NAME, SETTINGS
from cbatch.cli.setting import ConsoleConfig, Setting
from cbatch.config import EngineConfig, JobConfig, SamplingParams
from cbatch.errors import UsageError

Target = TypeVar("Target")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that one `cbatch run` was asked for."""

    engine: EngineConfig
    job: JobConfig
    console: ConsoleConfig
    evidence: dict[str, Any] = field(default_factory=dict)  # where the settings were tuned


@dataclass(frozen=True, slots=True)
class Given:
    """What a command was given, checked, by the names of its settings."""

    inputs: tuple[str, ...]
    values: dict[str, Any]
    settings: Sequence[Setting]
    file: ConfigFile

    def of(self, target: type) -> dict[str, Any]:
        """Give what was given for the fields of `target`."""
        names = (setting.name for setting in self.settings if setting.target is target)
        return {name: self.values[name] for name in names if name in self.values}

    def build(self, target: type[Target]) -> Target:
        """Build a configuration of what was given for it."""
        return target(**self.of(target))

    def job(self, **others: Any) -> JobConfig:
        """Build the job's configuration, with what no setting gives."""
        return JobConfig(inputs=self.inputs, sampling=self.of(SamplingParams), **self.of(JobConfig), **others)


def read_given(inputs: list[str], config: str | None, given: dict[str, Any], settings: Sequence[Setting]) -> Given:
    """Check what was given for `settings`, the command line over a TOML file of `run`, whose others are left alone.

    `given` maps parameter names to text, lists of text or booleans; None stands for what was not given.
    """
    file = read_config_file(config or None)
    found: Any = tuple(inputs) or file.settings.get(INPUTS, ())
    known = {(setting.name, setting.target) for setting in settings}
    values = {name: value for name, value in file.settings.items() if (name, _target(name)) in known}
    return Given(found, values | _command_line(given, settings), settings, file)


def read_options(inputs: list[str], config: str | None, given: dict[str, Any]) -> RunOptions:
    """Check what `run` was given and build its configurations."""
    found = read_given(inputs, config, given, SETTINGS)
    check_present(found, "run", output="-o OUT.jsonl or OUT.parquet")
    return RunOptions(
        engine=found.build(EngineConfig),
        job=found.job(),
        console=found.build(ConsoleConfig),
        evidence=found.file.evidence,
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


def _target(name: str) -> type | None:
    """The configuration that `run` fills with this setting: another command may have one of the same name."""
    return BY_NAME[name].target if name in BY_NAME else None
