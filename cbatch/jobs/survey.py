"""One pass over the whole input before anything runs: for what must be the same in every shard, or known ahead.

Shards agree on the number of rows, on column names and on one schema because each looks at all rows. An OpenAI Batch
file is checked for ids that are used twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import InputError
from cbatch.io.columns import words_of_row
from cbatch.io.rows import Row
from cbatch.io.sources import Source
from cbatch.io.streams import STDIN
from cbatch.jobs.compact import PartitionedTable
from cbatch.jobs.keys import hash_text
from cbatch.jobs.ledger import fingerprint
from cbatch.jobs.openai import CUSTOM_ID
from cbatch.jobs.reader import is_like_ours

if TYPE_CHECKING:
    import pyarrow as pa

MAX_DUPLICATES_SHOWN = 5
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Survey:
    """What the whole input holds."""

    num_rows: int
    digest: bytes  # of all rows: the same input has the same one
    colliding_names: frozenset[str]  # columns that are named like ours
    asked: frozenset[str]  # words by which rows ask for optional columns
    schema: pa.Schema | None  # found over all rows, where asked for


def can_reread(source: Source) -> bool:
    """Whether iterating the source again gives the same rows: standard input and pipes are gone once read."""
    paths = [Path(name) for name in source.inputs]
    return all(str(path) != STDIN and (path.is_file() or not path.exists() or path.is_dir()) for path in paths)


def survey(rows: Iterable[Row], *, infer: bool, tick: Callable[[], None]) -> Survey:
    """Look at every row; `tick` is called once for each. Raises InputError."""
    inference = None
    if infer:
        from cbatch.io.inference import TypeInference

        inference = TypeInference()
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    num_rows = 0
    names: set[str] = set()
    asked: set[str] = set()
    for row in rows:
        tick()
        num_rows += 1
        digest.update(hash_text(json.dumps(row.columns, default=repr)))
        names.update(name for name in row.columns if is_like_ours(name))
        asked |= words_of_row(row.columns)
        if inference is not None:
            inference.observe(row.columns)
    schema = inference.schema() if inference is not None else None
    return Survey(num_rows, digest.digest(), frozenset(names), frozenset(asked), schema)


def check_custom_ids(rows: Iterable[Row], tick: Callable[[], None]) -> None:
    """Find the ids of an OpenAI Batch file that are used twice. Raises InputError that lists the first of them."""
    seen = PartitionedTable("I")  # line numbers are not kept: the row's number, from 1
    shown: list[str] = []
    num_duplicates = 0
    for row in rows:
        tick()
        custom_id = row.columns.get(CUSTOM_ID)
        if not isinstance(custom_id, str):
            continue
        mark = fingerprint(hash_text(custom_id))
        first = seen.get(mark)
        if first is None:
            seen.put(mark, row.index + 1)
            continue
        num_duplicates += 1
        if len(shown) < MAX_DUPLICATES_SHOWN:
            shown.append(f"'{custom_id}' in requests {first} and {row.index + 1}")
    if num_duplicates:
        more = f" and {num_duplicates - len(shown)} more" if num_duplicates > len(shown) else ""
        raise InputError(
            f"{num_duplicates} requests have a custom_id that another has: {', '.join(shown)}{more}",
            hint="answers could not be told apart: give every request its own",
        )
