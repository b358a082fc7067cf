"""What the user names as input, as the list of what is read: patterns expanded, in a fixed order. Called by sources."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cbatch.errors import UsageError
from cbatch.io.remote import glob_remote, is_url
from cbatch.io.streams import STDIN, reading


def expand(inputs: Sequence[str], leave_out: Callable[[str], bool] = lambda _name: False) -> list[str]:
    """Replace each pattern by the files that it matches, sorted. A name that exists is itself, whatever is in it.

    A pattern does not mean the local files that `leave_out` holds for.
    Raises UsageError for a pattern without a match and for standard input given twice, InputError for what cannot be
    looked at.
    """
    if "" in inputs:
        raise UsageError("the name of an input is empty")
    names = [name for given in inputs for name in _expand_one(given, leave_out)]
    if names.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once")
    return names


def _expand_one(name: str, leave_out: Callable[[str], bool]) -> Iterator[str]:
    if name == STDIN or not glob.has_magic(name):
        yield name
        return
    if is_url(name):
        if "?" in name and "*" not in name:  # a query, not a pattern
            yield name
            return
        with reading(name):
            matches = glob_remote(name)
    else:
        with reading(name):
            exists = Path(name).exists()
            found = glob.glob(name, recursive=True)  # noqa: PTH207 Path.glob takes no absolute pattern
            files = [match for match in found if Path(match).is_file() and not leave_out(match)]
            matches = [name] if exists else files
    if not matches:
        raise UsageError(f"no file matches {name}")
    yield from sorted(matches)
