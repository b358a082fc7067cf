"""The TOML file of `--config`: the options' names with underscores, in one flat table. Used by `run`.

A file that `cbatch tune` wrote has a table of evidence beside them, which is no setting.

Leaves out merging with the command line, which wins, and what a whole configuration needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbatch.cli.options import ALIASES, BY_NAME
from cbatch.cli.setting import Setting
from cbatch.errors import UsageError
from cbatch.tune.evidence import TABLE

INPUTS = "inputs"  # the command's arguments, which have no option


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file gives; read once, as it may be a pipe."""

    settings: dict[str, object] = field(default_factory=dict)  # checked, under their own names; the inputs too
    evidence: dict[str, Any] = field(default_factory=dict)  # what a tuned file says of its making


def read_config_file(path: str | None) -> ConfigFile:
    """Read a file; without one nothing is given. Raises UsageError."""
    if path is None:
        return ConfigFile()
    given: dict[str, object] = {}
    evidence: dict[str, Any] = {}
    for key, value in _load(path).items():
        if key == TABLE and isinstance(value, dict):
            evidence = value
            continue
        spelled = f"{key} in {path}"
        if key == INPUTS:
            given[INPUTS] = _inputs(value, spelled)
            continue
        setting = _setting(key, path)
        if setting.name in given:
            raise UsageError(f"{path} gives {setting.name} twice", hint=f"{key} is another word for it")
        given[setting.name] = setting.from_toml(value, spelled)
    return ConfigFile(given, evidence)


def _load(path: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error


def _setting(key: str, path: str) -> Setting:
    setting = BY_NAME.get(key) or ALIASES.get(key)
    if setting is None:
        import difflib

        near = difflib.get_close_matches(key.replace("-", "_"), [*BY_NAME, INPUTS], n=1)
        hint = f"did you mean {near[0]}?" if near else "`cbatch run --help` lists the settings"
        raise UsageError(f"{path} gives {key}, which is no setting", hint=hint)
    return setting


def _inputs(value: object, spelled: str) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise UsageError(f"{spelled} must be a path or a list of paths: it is {value!r}")
    return tuple(items)
