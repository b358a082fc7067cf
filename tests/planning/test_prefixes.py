"""The tree of prompts against a search through all earlier ones, and its bound on memory."""

from __future__ import annotations

import random

import pytest

from cbatch.planning.prefixes import NODE_BYTES, PrefixTree


def longest_common(ids: list[int], others: list[list[int]]) -> int:
    """The most leading tokens that any of the others shares."""
    most = 0
    for other in others:
        count = 0
        while count < min(len(ids), len(other)) and ids[count] == other[count]:
            count += 1
        most = max(most, count)
    return most


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_shares_what_it_shares_with_the_most_alike_of_the_earlier_ones(seed: int) -> None:
    rng = random.Random(seed)
    tree = PrefixTree()
    earlier: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(earlier) if earlier and rng.random() < 0.8 else []
        ids = base[: rng.randrange(len(base) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(6))]
        if not ids:
            continue
        assert tree.add(ids) == longest_common(ids, earlier)
        earlier.append(ids)
    assert tree.num_remembered == len(earlier)


def test_large_token_ids_are_told_apart_by_all_of_their_bytes() -> None:
    tree = PrefixTree()
    tree.add([1 << 24, 5, 1 << 16])
    assert tree.add([1 << 24, 5, 1 << 17]) == 2
    assert tree.add([2 << 24, 5, 1 << 16]) == 0


def test_what_no_longer_fits_is_looked_up_but_not_remembered() -> None:
    tree = PrefixTree(max_bytes=2 * (NODE_BYTES + 4 * 100))
    first, second, third = ([i] * 100 for i in range(3))
    assert [tree.add(ids) for ids in (first, second, third)] == [0, 0, 0]
    assert tree.is_full
    assert [tree.add(ids) for ids in (first, second, third)] == [100, 100, 0]
    assert tree.num_remembered == 2
