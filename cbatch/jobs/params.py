"""Per-row sampling parameters: one table, and the rules that make nothing meant get ignored.

`ParamReader` turns a row's columns into the parameters that were given, the row's over the command line's, each
checked. Called by the feeder for every row, and once at the start for the command line. `resolve` adds the model's
defaults.
Leaves out what the engine does with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from cbatch.config import SamplingParams
from cbatch.errors import RowError, UsageError
from cbatch.io import jsonform
from cbatch.jobs.names import find_meant

INT_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1
EXACT_FLOAT_MAX = 2**53  # beyond it a float no longer says which whole number was meant
MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 1000
MAX_SAMPLES = 1024
MAX_REPETITION = 100.0
MAX_PENALTY = 2.0  # as in OpenAI's interface, and so is the next
MAX_BIAS = 100.0

STRUCTURES = ("json_schema", "json_object", "regex", "choice")
BAD_PARAMETER = "bad_parameter"
UNKNOWN_PARAMETER = "unknown_parameter"


def parse_int(low: int, high: int, value: object) -> int:
    """Take a whole number; 128.0 counts, since data frames write whole numbers so where another row has none."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_FLOAT_MAX:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    if not low <= value <= high:
        raise ValueError
    return value


def parse_float(accept: Callable[[float], bool], value: object) -> float:
    """Take a finite number that `accept` holds for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if abs(value) > EXACT_FLOAT_MAX or not math.isfinite(value) or not accept(float(value)):
        raise ValueError
    return float(value)


def parse_bool(value: object) -> bool:
    """Take true or false and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise TypeError
    return value


def parse_stop(value: object) -> tuple[str, ...]:
    """Take one string or a list of strings, none empty, all encodable."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise TypeError
    for item in strings:
        if not item:
            raise ValueError
        item.encode()  # a lone surrogate is a ValueError, and could never match
    return tuple(dict.fromkeys(strings))


def parse_token_ids(value: object) -> tuple[int, ...]:
    """Take one token id or a list of them; whether the model has them is the engine's to say."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(parse_int(0, INT_MAX, item) for item in items))


def parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Take an object of token ids, as JSON spells its keys, and numbers, or its JSON text; null is no number."""
    table = jsonform.load(value) if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise TypeError
    bias = {
        parse_int(0, INT_MAX, int(token_id)): parse_float(lambda number: abs(number) <= MAX_BIAS, number)
        for token_id, number in table.items()
        if number is not None
    }
    return tuple(sorted(bias.items()))


def parse_json_schema(value: object) -> str:
    """Take a schema, an object or its JSON text; whether it compiles is the engine's to say.

    OpenAI's object around one, as a schema, would allow everything.
    """
    schema = jsonform.load(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise TypeError
    if "name" in schema and isinstance(schema.get("schema"), dict):
        raise ValueError
    text = json.dumps(schema)  # ASCII, its keys in their order, which is the output's
    text.encode()
    return text


def parse_regex(value: object) -> str:
    """Take a text that is not empty."""
    if not isinstance(value, str):
        raise TypeError
    (value,) = parse_stop(value)
    return value


def parse_choice(value: object) -> tuple[str, ...]:
    """Take a list of texts, none of them empty."""
    if isinstance(value, str):
        raise TypeError
    choices = parse_stop(value)
    if not choices:
        raise ValueError
    return choices


def parse_logprobs(value: object) -> int | None:
    """Take how many of the likeliest tokens are wanted; true is none of them but the score, false no score at all."""
    if isinstance(value, bool):
        return 0 if value else None
    return parse_int(0, MAX_LOGPROBS, value)


def parse_top_k(value: object) -> int:
    """Take a whole number; -1, which other engines use for "all", is 0 here."""
    return max(0, parse_int(-1, INT_MAX, value))


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: its allowed values in words, and a parser that raises TypeError or ValueError."""

    name: str
    allowed: str
    parse: Callable[[Any], object]


def _penalty(name: str) -> Param:
    allowed = f"a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
    return Param(name, allowed, partial(parse_float, lambda value: abs(value) <= MAX_PENALTY))


PARAMS = (
    Param("max_tokens", f"a whole number from 0 to {INT_MAX}", partial(parse_int, 0, INT_MAX)),
    Param("min_tokens", f"a whole number from 0 to {INT_MAX}", partial(parse_int, 0, INT_MAX)),
    Param(
        "temperature",
        f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}",
        partial(parse_float, lambda value: 0 <= value <= MAX_TEMPERATURE),
    ),
    Param("top_p", "a number above 0 and at most 1", partial(parse_float, lambda value: 0 < value <= 1)),
    Param("top_k", "a whole number of at least 0 (0 keeps all)", parse_top_k),
    Param("min_p", "a number from 0 (keeps all) to 1", partial(parse_float, lambda value: 0 <= value <= 1)),
    Param(
        "repetition_penalty",
        f"a number above 0 and at most {MAX_REPETITION:g} (1 changes nothing)",
        partial(parse_float, lambda value: 0 < value <= MAX_REPETITION),
    ),
    _penalty("presence_penalty"),
    _penalty("frequency_penalty"),
    Param(
        "logit_bias",
        f'an object of token ids and numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, such as {{"50256": -100}}',
        parse_logit_bias,
    ),
    Param("seed", "a whole number from 0 to 2^63 - 1", partial(parse_int, 0, SEED_MAX)),
    Param("n", f"a whole number from 1 to {MAX_SAMPLES}", partial(parse_int, 1, MAX_SAMPLES)),
    Param("stop", "a string or a list of strings, none of them empty", parse_stop),
    Param("include_stop_str_in_output", "true or false", parse_bool),
    Param("stop_token_ids", "a token id or a list of token ids", parse_token_ids),
    Param("ignore_eos", "true or false", parse_bool),
    Param("logprobs", f"true, false or a whole number from 0 to {MAX_LOGPROBS}", parse_logprobs),
    Param("json_schema", "a JSON schema itself: an object, or its text", parse_json_schema),
    Param("json_object", "true or false", parse_bool),
    Param("regex", "a regular expression", parse_regex),
    Param("choice", "a list of strings, none of them empty", parse_choice),
    Param("prompt_logprobs", f"true, false or a whole number from 0 to {MAX_LOGPROBS}", parse_logprobs),
)


class ParamReader:
    """Reads the parameters of rows, under the command line's."""

    def __init__(
        self, command_line: Mapping[str, object], *, row_params: bool = True, text_values: bool = False
    ) -> None:
        """Check the command line's values; `text_values` is for rows of CSV, all text. Raises UsageError."""
        self._params = {param.name: param for param in PARAMS}
        try:
            self._defaults = self._parse(command_line.items())
            _check_together(self._defaults)
        except RowError as error:
            raise UsageError(error.message) from None
        self._row_params = row_params
        self._text_values = text_values
        self._meant = lru_cache(maxsize=4096)(partial(find_meant, names=tuple(self._params)))

    def read(self, columns: Mapping[str, object]) -> dict[str, object]:
        """Return the parameters given for a row, parsed, in the table's order. Raises RowError."""
        if not self._row_params:
            return self._defaults
        items: Iterable[tuple[str, object]] = columns.items()
        if self._text_values:
            items = ((name, from_text(name, value)) for name, value in items)
        own = self._parse((name, value) for name, value in items if self._is_param(name, value))
        defaults = self._defaults
        if any(own.get(name) for name in STRUCTURES):  # which take each other's place
            defaults = {name: value for name, value in defaults.items() if name not in STRUCTURES}
        given = {**defaults, **own}
        _check_together(given)
        return {name: given[name] for name in self._params if name in given}

    def meaning_of(self, name: str) -> str | None:
        """Return the parameter that a column's name is or nearly is; None for plain data."""
        return self._meant(name)

    def _is_param(self, name: str, value: object) -> bool:
        meant = self._meant(name) if value is not None else None
        if meant is not None and meant != name:
            raise RowError(
                UNKNOWN_PARAMETER,
                f"column '{name}' looks like the parameter {meant}: rename it, or pass --no-row-params to keep every "
                "column as plain data",
            )
        return meant is not None

    def _parse(self, items: Iterable[tuple[str, object]]) -> dict[str, object]:
        given = {}
        for name, value in items:
            if value is not None:
                given[name] = parse_param(self._params[name], value)
        return given


def parse_param(param: Param, value: object) -> object:
    """Return the value as the engine takes it. Raises RowError that names parameter, value and allowed range."""
    try:
        return param.parse(value)
    except (TypeError, ValueError):
        raise RowError(BAD_PARAMETER, f"{param.name} must be {param.allowed}: it is {_show(value)}") from None


def from_text(name: str, value: object) -> object:
    """Return what a CSV field says: empty is not given, the rest is read as JSON where it is; a stop string is text."""
    if not isinstance(value, str):
        return value
    if not value or name == "regex" or (name == "stop" and not value.startswith("[")):
        return value or None
    try:
        return jsonform.load(value.lower() if value.lower() in ("true", "false") else value)
    except ValueError:
        return value


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse values that are right each by itself."""
    least, most = given.get("min_tokens", 0), given.get("max_tokens")
    if most is not None and least > most:
        raise RowError(BAD_PARAMETER, f"min_tokens is {least}, and max_tokens only {most}")
    structures = [name for name in STRUCTURES if given.get(name)]
    if len(structures) > 1:
        raise RowError(BAD_PARAMETER, f"{structures[0]} and {structures[1]} cannot both be followed: leave one out")
    if structures and given.get("ignore_eos"):
        raise RowError(
            BAD_PARAMETER, f"{structures[0]} and ignore_eos exclude each other: the output ends where it is whole"
        )


def _show(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_model_defaults(defaults: Mapping[str, object]) -> dict[str, object]:
    """Parse the sampling defaults of a model's generation config. Raises UsageError."""
    params = {param.name: param for param in PARAMS}
    try:
        return {
            name: parse_param(params[name], value)
            for name, value in defaults.items()
            if name in params and value is not None
        }
    except RowError as error:
        raise UsageError(
            f"the model's generation config does not work: {error.message}",
            hint="--generation-config none leaves it out",
        ) from None


def resolve(given: Mapping[str, object], defaults: Mapping[str, object], seed: int) -> SamplingParams:
    """Put what was given over the model's defaults; `seed` is the row's where none was given."""
    values: dict[str, Any] = {"seed": seed, **defaults, **given}
    return SamplingParams(**values)
