"""The sample looks like the input: prefix groups stay whole, short and long prompts keep their shares, at any size."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from cbatch.errors import RowError
from cbatch.io.rows import Row
from cbatch.jobs.ledger import Ledger
from cbatch.jobs.params import ParamReader
from cbatch.jobs.reader import JobReader, plain_rows
from cbatch.jobs.rendering import Renderer
from cbatch.tune.profile import MAX_LINK, Profile, read_profile
from cbatch.tune.sample import MAX_RUN_ROWS, RUN_ROWS, count_runs, pick_rows, split_into_runs


def profile_of(rows: list[object], max_tokens: int | None = 10) -> Profile:
    """The profile of prompts, or of rows as they are."""
    columns = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
    source = [Row(i, f"in:{i}", c, None) for i, c in enumerate(columns)]
    reader = JobReader(source, plain_rows(ParamReader({}), Renderer()), Ledger(), b"")
    return read_profile(reader, max_tokens, lambda: None)


def grouped(num_groups: int, size: int, rng: random.Random) -> list[object]:
    """Groups of prompts about one document each, all behind the same instruction."""
    documents = [" ".join(str(rng.random()) for _ in range(40)) for _ in range(num_groups)]
    return [f"Answer from the text. {text} Question {rng.random()}" for text in documents for _ in range(size)]


def test_sizes_are_of_prompt_and_completion() -> None:
    profile = profile_of(["x" * 400, {"prompt": "x" * 40, "max_tokens": 300}, {"prompt_token_ids": [5] * 70}])
    assert list(profile.sizes) == [100 + 10 + 1, 10 + 300 + 1, 70 + 10 + 1]
    assert profile_of(["x"], max_tokens=None).sizes[0] > 1000


def test_links_are_the_share_of_a_prompt_that_the_one_before_has() -> None:
    ids = [{"prompt_token_ids": list(range(50)) + [tail] * 50} for tail in (7, 8)]
    profile = profile_of(["abcdefgh", "abcdefgh", "abcdXXXX", "12345678", *ids])
    assert list(profile.links) == [0, MAX_LINK, MAX_LINK // 2, 0, 0, MAX_LINK // 2]
    chats = [{"messages": [{"role": "system", "content": "S" * 300}, {"role": "user", "content": c}]} for c in "ab"]
    assert profile_of(list(chats)).links[1] >= MAX_LINK - 2


def test_bad_rows_are_counted_and_never_picked() -> None:
    rows: list[object] = ["good", {"prompt": ""}, {"text": "no prompt"}, "good too", {"prompt": 5}]
    profile = profile_of(rows)
    assert (len(profile), profile.num_good) == (5, 2)
    assert isinstance(profile.first_error, RowError)
    assert sorted(pick_rows(profile, 0, 10)) == [0, 3]


@pytest.mark.parametrize("size", [3, 5, 12, 25])
def test_prefix_groups_stay_whole(size: int) -> None:
    profile = profile_of(grouped(30, size, random.Random(size)))
    runs = split_into_runs(profile)
    assert [i for run in runs for i in run] == list(range(len(profile)))
    assert all(run.start % size == 0 for run in runs)
    picked = pick_rows(profile, 0, 4 * 3 * size)
    whole = [sum(i // size == group for i in picked) for group in {i // size for i in picked}]
    assert sum(count == size for count in whole) >= len(whole) - 1  # the last may be cut where the sample ends


def test_groups_longer_than_a_sample_are_cut_into_runs() -> None:
    profile = profile_of(grouped(2, 500, random.Random(0)))
    runs = split_into_runs(profile)
    assert all(len(run) <= MAX_RUN_ROWS for run in runs)
    assert {run.start // 500 for run in runs} == {run[-1] // 500 for run in runs}


def test_rows_with_nothing_in_common_come_in_short_runs() -> None:
    rng = random.Random(0)
    profile = profile_of([str(rng.random())[2:] for _ in range(200)])
    lengths = [len(run) for run in split_into_runs(profile)]
    assert sorted(lengths)[len(lengths) // 2] == RUN_ROWS


@pytest.mark.parametrize("count", [16, 48, 160])
@pytest.mark.parametrize("order", ["mixed", "sorted"])
def test_lengths_keep_their_shares_at_every_size(count: int, order: str) -> None:
    """One prompt in four is long, wherever in the file they stand."""
    rng = random.Random(0)
    lengths = [4000 if i % 4 == 0 else 200 for i in range(2000)]
    lengths.sort() if order == "sorted" else rng.shuffle(lengths)
    profile = profile_of([str(rng.random()) + "x" * length for length in lengths])
    shares = []
    for seed in range(5):
        picked = pick_rows(profile, seed, count)
        assert len(picked) == count
        shares.append(sum(lengths[i] > 1000 for i in picked) / count)
    assert sum(shares) / len(shares) == pytest.approx(0.25, abs=0.08)
    assert all(abs(share - 0.25) <= (0.25 if count == 16 else 0.1) for share in shares)


def test_every_beginning_of_the_order_is_spread_over_the_lengths() -> None:
    rng = random.Random(0)
    sizes = [rng.choice([100, 1000, 10_000]) for _ in range(300) for _ in range(RUN_ROWS)]
    sizes = [sizes[i - i % RUN_ROWS] for i in range(len(sizes))]
    profile = profile_of([str(rng.random()) + "x" * size for size in sizes])
    picked = pick_rows(profile, 1, 10**6)
    assert sorted(picked) == list(range(len(profile)))
    for count in (6 * RUN_ROWS, 24 * RUN_ROWS):
        seen = [sizes[i] for i in picked[:count]]
        assert all(seen.count(size) >= count // 8 for size in (100, 1000, 10_000))


def test_the_same_seed_picks_the_same_rows_and_another_others() -> None:
    rng = random.Random(0)
    profile = profile_of([str(rng.random()) * rng.randrange(1, 9) for _ in range(500)])
    assert pick_rows(profile, 3, 40) == pick_rows(profile, 3, 40)
    assert pick_rows(profile, 3, 40) != pick_rows(profile, 4, 40)


def test_the_sample_is_contiguous_rows() -> None:
    rng = random.Random(0)
    profile = profile_of([str(rng.random()) for _ in range(500)])
    picked = sorted(pick_rows(profile, 0, 40))
    runs = [list(group) for _, group in groupby(enumerate(picked), lambda pair: pair[1] - pair[0])]
    assert count_runs(picked) == len(runs) <= 40 // (RUN_ROWS // 2)
    assert count_runs([]) == 0


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_small_inputs_are_taken_whole(num_rows: int) -> None:
    profile = profile_of([f"{i} prompt" for i in range(num_rows)])
    assert sorted(pick_rows(profile, 0, 64)) == list(range(num_rows))
