"""Which rows stand for the whole input: contiguous runs, prefix groups whole where they are not long, of all lengths.

The runs come in an order of which every beginning is a sample of its own: small samples and large ones look alike. The
same for the same seed. Leaves out tokenising, and how many rows there is time for (`calibrate`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from cbatch.tune.profile import Profile

RUN_ROWS = 4  # of a run, where nothing links its rows
MAX_RUN_ROWS = 32
# What a cut costs: the eighths of a prompt that it parts from its group, and this much per doubling of the usual run.
DOUBLING_COST = 0.75


def pick_rows(profile: Profile, seed: int, max_rows: int) -> list[int]:
    """Pick up to `max_rows` good rows, by their index, in the order in which a growing sample takes them."""
    runs = [run for run in split_into_runs(profile) if any(profile.sizes[i] for i in run)]
    picked: list[int] = []
    for run in _spread(runs, profile, seed):
        picked += [index for index in run if profile.sizes[index]]
        if len(picked) >= max_rows:
            break
    return picked[:max_rows]


def split_into_runs(profile: Profile) -> list[range]:
    """Cut the input where neighbours have little in common."""
    runs = []
    start, num_rows = 0, len(profile)
    while start < num_rows:
        end = min(range(start + 1, min(start + MAX_RUN_ROWS, num_rows) + 1), key=lambda at: _cost(profile, start, at))
        runs.append(range(start, end))
        start = end
    return runs


def count_runs(rows: Sequence[int]) -> int:
    """Count the contiguous runs of rows among some that are sorted."""
    return sum(index == 0 or rows[index - 1] + 1 != row for index, row in enumerate(rows))


def _cost(profile: Profile, start: int, at: int) -> float:
    """What it costs to end at `at` a run that begins at `start`."""
    link = profile.links[at] if at < len(profile) else 0
    return link + DOUBLING_COST * abs(math.log2((at - start) / RUN_ROWS))


def _spread(runs: Sequence[range], profile: Profile, seed: int) -> Iterator[range]:
    """Yield all runs, those of any length as early as those of any other: van der Corput's order over the sorted ones.

    https://en.wikipedia.org/wiki/Van_der_Corput_sequence
    """
    rng = random.Random(seed)
    by_size = sorted(runs, key=lambda run: (sum(profile.sizes[i] for i in run) / len(run), run.start))
    offset = rng.random()
    width = max(1, len(by_size) - 1).bit_length()
    seen: set[int] = set()
    for number in range(2**width):
        reverse = int(f"{number:0{width}b}"[::-1], 2) / 2**width
        place = int((reverse + offset) % 1.0 * len(by_size))
        if place not in seen:
            seen.add(place)
            yield by_size[place]
    yield from (run for place, run in enumerate(by_size) if place not in seen)
