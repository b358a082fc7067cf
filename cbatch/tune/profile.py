"""What an input looks like, row by row, before a model is there: how long prompts are and how alike neighbours begin.

One pass over all rows, five bytes kept of each. Read by `sample`. Lengths are in tokens as far as a prompt gives them,
else in characters by `CHARACTERS_PER_TOKEN`: only their proportions count.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cbatch.config import DEFAULT_MAX_TOKENS
from cbatch.errors import RowError
from cbatch.jobs.reader import JobRow
from cbatch.jobs.rendering import Rendered

CHARACTERS_PER_TOKEN = 4
MAX_LINK = 8  # eighths of a prompt that may be the same as in the one before


@dataclass(slots=True)
class Profile:
    """Sizes and links of all rows; a row that cannot run has size 0."""

    sizes: array[int] = field(default_factory=lambda: array("I"))  # approximate tokens of prompt and completion
    links: array[int] = field(default_factory=lambda: array("B"))  # eighths of the prompt that begin as the row before
    num_good: int = 0
    first_error: RowError | None = None

    def __len__(self) -> int:
        return len(self.sizes)


def read_profile(rows: Iterable[JobRow], max_tokens: int | None, tick: Callable[[], None]) -> Profile:
    """Look at every row; `max_tokens` is that of rows that do not say, `tick` is called for each."""
    profile = Profile()
    before: Sequence[object] = ""
    for row in rows:
        tick()
        if row.rendered is None:
            profile.sizes.append(0)
            profile.links.append(0)
            profile.first_error = profile.first_error or row.error
            before = ""
            continue
        prompt, scale = _sequence(row.rendered)
        asked = row.given.get("max_tokens", max_tokens)
        wanted = asked if isinstance(asked, int) else DEFAULT_MAX_TOKENS
        profile.sizes.append(min(2**32 - 1, len(prompt) // scale + wanted + 1))
        profile.links.append(MAX_LINK * _common(before, prompt) // max(1, len(prompt)))
        profile.num_good += 1
        before = prompt
    return profile


def _sequence(rendered: Rendered) -> tuple[Sequence[object], int]:
    """Return what a prompt is compared by, and how much of it is about a token."""
    if rendered.kind == "token_ids":
        return rendered.value, 1
    if rendered.kind == "text":
        return rendered.value, CHARACTERS_PER_TOKEN
    return rendered.canonical().decode(), CHARACTERS_PER_TOKEN


def _common(left: Sequence[object], right: Sequence[object]) -> int:
    """Count the items that two prompts have in common at their start; none where they are of different kinds."""
    if type(left) is not type(right):
        return 0
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
