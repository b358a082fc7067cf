"""How much of a job's prompts stands at the start of an earlier one: an estimate from the rows, without a tokenizer.

A prompt is cut into pieces, and each piece is known by all that comes before it, as the cache's blocks are. Called by
`subjects`. Looks at files only: what comes from elsewhere may be gone once read, or dear to read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from cbatch.errors import CbatchError, RowError
from cbatch.io.remote import is_url
from cbatch.io.sources import open_source
from cbatch.io.streams import STDIN
from cbatch.jobs.openai import is_batch_row
from cbatch.jobs.rendering import Rendered, Renderer
from cbatch.jobs.report import PROMPT_SETTINGS

MAX_ROWS = 2_000
PIECE_TOKENS = 16
PIECE_CHARACTERS = 64  # about as much
UNKNOWN = "what prompts have in common is not known"
NAMING = ("prompt_column", "template")  # settings that say what the prompt is


@dataclass(frozen=True, slots=True)
class Likeness:
    """The share of the prompts' length, 0 to 1, that stands at the start of an earlier one; or why it is not known."""

    share: float = 0.0
    unseen: str = ""


def likeness(inputs: Sequence[str], settings: Mapping[str, Any]) -> Likeness:
    """Look at the first rows of a job's input; `settings` are the job's, which say what of a row is the prompt."""
    if is_gone_once_read(inputs) or any(map(is_url, inputs)):
        return Likeness(unseen=f"{UNKNOWN}: {', '.join(inputs)} is not read for that")
    try:
        share = _shared_share(_rows(inputs, settings))
    except CbatchError as error:
        return Likeness(unseen=f"{UNKNOWN}: {error}")
    return Likeness(unseen=f"{UNKNOWN}: no prompt is found in the rows") if share is None else Likeness(share)


def is_gone_once_read(inputs: Sequence[str]) -> bool:
    """Whether an input is standard input or a pipe."""
    return any(name == STDIN or Path(name).is_fifo() for name in inputs)


def is_batch_file(inputs: Sequence[str], settings: Mapping[str, Any]) -> bool:
    """Whether `run` takes an input for an OpenAI Batch file, by its first row; only files are looked into."""
    if any(name in settings for name in NAMING) or is_gone_once_read(inputs) or any(map(is_url, inputs)):
        return False
    try:
        first = next((row for row in open_source(list(inputs)) if row.error is None), None)
    except CbatchError:  # that the input cannot be read is for `run` to say
        return False
    return first is not None and is_batch_row(first.columns)


def _rows(inputs: Sequence[str], settings: Mapping[str, Any]) -> Iterator[tuple[list[bytes], int]]:
    """Yield the pieces of every row that has a prompt."""
    given = {name: settings[name] for name in PROMPT_SETTINGS if settings.get(name) is not None}
    renderer = Renderer(**given)
    is_named = any(name in given for name in NAMING)
    for row in islice(open_source(list(inputs)), MAX_ROWS):
        if row.error is not None:
            continue
        columns: Any = row.columns
        if not is_named and is_batch_row(row.columns):
            columns = row.columns.get("body")
            if not isinstance(columns, dict):
                continue
        try:
            yield _pieces(renderer.render(columns))
        except RowError:
            continue


def _shared_share(rows: Iterable[tuple[list[bytes], int]]) -> float | None:
    """Add the pieces of all rows up; None where there is no row."""
    seen: set[bytes] = set()
    total = shared = 0
    for pieces, size in rows:
        digest, is_known = b"", True
        for piece in pieces:
            digest = blake2b(digest + piece, digest_size=16).digest()
            is_known = is_known and digest in seen
            shared += is_known
            seen.add(digest)
        total += size
    return shared / total if total else None


def _pieces(prompt: Rendered) -> tuple[list[bytes], int]:
    """Cut a prompt into whole pieces; give them and how many there are, the last torn one counted."""
    if prompt.kind == "token_ids":
        values, size = prompt.value, PIECE_TOKENS
    else:
        values = prompt.value if prompt.kind == "text" else json.dumps(prompt.value)
        size = PIECE_CHARACTERS
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    whole = parts[: len(values) // size]
    return [str(part).encode("utf-8", "surrogatepass") for part in whole], len(parts)
