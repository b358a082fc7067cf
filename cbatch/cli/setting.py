"""One setting: its name, its type, its range, and the words that say so. Used by all of `cli` that reads any.

The type and the choices come from the field of the configuration that the setting fills, so they are written once.
A value passes `Setting.from_text` (command line) or `Setting.from_toml`, and both end in the same check; that of a
sampling parameter is the one that rows pass. Leaves out what only the engine or the job can know: whether a value works
with this model and this input.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cbatch.config import SamplingParams
from cbatch.errors import UsageError
from cbatch.jobs.params import INT_MAX, PARAMS

Kind = Literal["flag", "int", "float", "text", "choice", "texts", "ints", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """What the command line itself acts on."""

    quiet: bool = False
    verbose: bool = False
    debug: bool = False


PATHS = ("FILE", "FOLDER", "OUT")  # how the help spells a value that names one

_ROW_PARAMS = {param.name: param for param in PARAMS}
_hints = lru_cache(get_type_hints)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that a number may take."""

    low: float = 1
    high: float = INT_MAX
    above: bool = False  # low itself is not allowed
    below: bool = False  # high itself is not allowed

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        is_above = self.low < value if self.above else self.low <= value
        is_below = value < self.high if self.below else value <= self.high
        return math.isfinite(value) and is_above and is_below

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low} and {'below' if self.below else 'at most'} {self.high}"
        return f"from {self.low} to {'below ' if self.below else ''}{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One word that the user can set: the field `name` of `target`."""

    name: str
    target: type  # a dataclass of what the user asked for
    panel: str
    help: str
    default: str | None = None  # how an absent value reads in the help; None: the field's own default
    bounds: Bounds = Bounds()
    only: tuple[str, ...] = ()  # the choices, where the field's type does not list them
    short: str | None = None
    aliases: tuple[str, ...] = ()  # other engines' spellings, hidden
    metavar: str | None = None

    @property
    def option(self) -> str:
        """The spelling on the command line: page_size → --page-size."""
        return "--" + self.name.replace("_", "-")

    @property
    def field(self) -> Field[Any]:
        return next(item for item in fields(self.target) if item.name == self.name)

    @property
    def annotation(self) -> Any:
        """The field's type without None."""
        hint = _hints(self.target)[self.name]
        if get_origin(hint) is UnionType:
            hint = next(member for member in get_args(hint) if member is not type(None))
        return hint

    @property
    def kind(self) -> Kind:
        hint = self.annotation
        if self.choices:
            return "choice"
        if get_origin(hint) is tuple:
            item = get_args(hint)[0]
            return "texts" if item is str else "ints" if item is int else "json"
        kinds: dict[object, Kind] = {bool: "flag", int: "int", float: "float", str: "text"}
        return kinds[hint]

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else self.only

    @property
    def default_words(self) -> str | None:
        """The default as the help and the docs show it; None where there is none to show."""
        if self.default is not None:
            return self.default
        value = self.field.default
        if value is MISSING or value is None or value == ():
            return None
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.target is SamplingParams:
            return _ROW_PARAMS[self.name].allowed
        words: dict[Kind, str] = {
            "flag": "true or false",
            "int": f"a whole number {self.bounds}",
            "float": f"a number {self.bounds}",
            "text": "a text that is not empty",
            "texts": "a list of texts, none empty",
            "choice": f"one of {', '.join(self.choices)}",
        }
        return words[self.kind]

    def from_text(self, text: str | list[str]) -> object:
        """Convert what was given on the command line; UsageError where it is not what is expected."""
        value: object = text
        try:
            if self.kind == "ints":
                value = [int(item) for item in text]
            elif self.kind == "int" and isinstance(text, str):
                value = int(text)
            elif self.kind == "float" and isinstance(text, str):
                value = float(text)
        except ValueError:
            raise self._refuse(self.option, text) from None
        return self.check(value, self.option)

    def from_toml(self, value: object, spelled: str) -> object:
        """Check one value of a TOML file, in which it is called `spelled`."""
        if self.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        return self.check(value, spelled)

    def check(self, value: object, spelled: str) -> object:
        """Return the value where its type and range are right; UsageError otherwise."""
        if self.target is SamplingParams:
            try:
                return _ROW_PARAMS[self.name].parse(value)
            except (TypeError, ValueError):
                raise self._refuse(spelled, value) from None
        if self.kind == "texts" and isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(value)
        types: dict[Kind, type] = {"flag": bool, "int": int, "float": float}
        fits = type(value) is types.get(self.kind, str)
        if fits and self.kind in ("int", "float"):
            fits = value in self.bounds
        elif fits and self.kind == "choice":
            fits = value in self.choices
        elif fits and self.kind == "text":
            fits = value != ""
        if not fits:
            raise self._refuse(spelled, value)
        if self.metavar in PATHS and isinstance(value, str) and value.startswith("~/"):
            return str(Path(value).expanduser())  # no shell does it for --output=~/out.jsonl, nor for a TOML file
        return value

    def _refuse(self, spelled: str, value: object) -> UsageError:
        return UsageError(f"{spelled} must be {self.expected}: it is {value!r}")
