"""Workloads with given lengths: the rows of a file, or the requests of a traced run.

Of what requests shared only the amount is known. It is given back as tokens that all prompts begin with, each as many
as it found in the cache, and the first prompt that is long enough as many as the most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cbatch.errors import InputError, UsageError
from cbatch.io.sources import open_source
from cbatch.simulate.tracefile import TracedSession
from cbatch.simulate.workload import MAX_ARRIVAL_S, GivenWorkload, Work

PROMPT_COLUMNS = ("prompt_tokens", "cbatch_prompt_tokens")
OUTPUT_COLUMNS = ("completion_tokens", "cbatch_completion_tokens", "output_tokens", "max_tokens")
CACHED_COLUMNS = ("cached_tokens", "cbatch_cached_tokens")
ARRIVAL_COLUMN = "arrival_s"
NOTHING = (None, "")  # which a row has in a column that it lacks, the latter in CSV
TOKEN_IDS = "prompt_token_ids"
COLUMNS_HINT = (
    "a finished run's output has prompt_tokens and completion_tokens; in a file of your own, max_tokens and "
    "prompt_token_ids do as well, and arrival_s says when a request comes"
)


class _Lengths(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    arrival_s: float


def read_lengths(path: str) -> GivenWorkload:
    """Read a row a request from any input that a job can have; rows without lengths (failed ones) are left out.

    Raises InputError where no row has any, UsageError for a value that is no length.
    """
    found = [lengths for row in open_source([path]) if (lengths := _lengths(row.columns, row.location)) is not None]
    if not found:
        raise InputError(f"no row of {path} says how long its prompt and its completion are", hint=COLUMNS_HINT)
    return _workload(found)


def traced_lengths(sessions: Sequence[TracedSession]) -> GivenWorkload:
    """Return the requests that finished in some sessions, in the order of their rows, each as it finished last.

    A job that was killed runs again what its journal had not got yet.
    """
    requests = {(r.request, r.sample): r for session in sessions for r in session.finished}
    ordered = [requests[key] for key in sorted(requests)]
    return _workload([_Lengths(r.prompt_tokens, r.output_tokens, r.cached_tokens, 0.0) for r in ordered])


def _lengths(columns: dict[str, Any], location: str) -> _Lengths | None:
    """Read the lengths of a row, None where it has none."""
    token_ids = columns.get(TOKEN_IDS)
    prompt = len(token_ids) if isinstance(token_ids, list) else _first(columns, PROMPT_COLUMNS, location)
    output = _first(columns, OUTPUT_COLUMNS, location)
    if not prompt or not output:
        return None
    cached = min(prompt, _first(columns, CACHED_COLUMNS, location) or 0)
    return _Lengths(prompt, output, cached, _arrival(columns.get(ARRIVAL_COLUMN), location))


def _arrival(value: Any, location: str) -> float:
    """Read when a request comes: a number, or its text, as CSV has it; nothing is the start."""
    try:
        seconds = 0.0 if value in NOTHING else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 <= seconds <= MAX_ARRIVAL_S:
        raise UsageError(f"{location}: {ARRIVAL_COLUMN} must be 0 to {MAX_ARRIVAL_S:g} seconds: it is {value!r}")
    return seconds


def _first(columns: dict[str, Any], names: Iterable[str], location: str) -> int | None:
    name = next((name for name in names if columns.get(name) not in NOTHING), None)
    if name is None:
        return None
    value = columns[name]
    if isinstance(value, str) and value.isdecimal():  # as CSV has it
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{location}: {name} must be a whole number that is not negative: it is {value!r}")
    return value


def _workload(found: Sequence[_Lengths]) -> GivenWorkload:
    return GivenWorkload(sorted(_works(found), key=lambda work: work.arrival_s))


def _works(found: Sequence[_Lengths]) -> Iterator[Work]:
    most = max((lengths.cached_tokens for lengths in found), default=0)
    first = next((index for index, lengths in enumerate(found) if lengths.prompt_tokens >= most), None)
    for index, lengths in enumerate(found):
        shared = most if index == first else lengths.cached_tokens
        yield Work(lengths.prompt_tokens, lengths.output_tokens, lengths.arrival_s, shared)
