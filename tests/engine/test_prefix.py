"""The hash of a block stands for its tokens and for all tokens before it, and for nothing else."""

import os
import random
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from cbatch.engine.cache.prefix import DIGEST_BYTES, PrefixIndex, extend_block_hashes

TOKENS = st.lists(st.sampled_from([-2, -1, 0, 1, 2, 2**31, 2**31 - 1, 2**40]), max_size=12)


def hashes_of(token_ids: list[int], page_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, page_size)
    return hashes


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_two_blocks_hash_alike_only_if_their_whole_prefixes_are_equal(a: list[int], b: list[int], size: int) -> None:
    for i, hash_a in enumerate(hashes_of(a, size), start=1):
        for j, hash_b in enumerate(hashes_of(b, size), start=1):
            assert (hash_a == hash_b) == (a[: i * size] == b[: j * size])


def test_no_collision_among_neighbours_that_cancel_in_a_linear_hash() -> None:
    rng = random.Random(0)
    seen: dict[bytes, tuple[int, ...]] = {}
    for _ in range(20_000):
        tokens = [rng.randrange(50_000) + rng.choice([0, 1, -1]) for _ in range(4)]
        shifted = [tokens[0] + 1, tokens[1] - 31, *tokens[2:]]
        for prefix in (tokens, shifted, tokens[::-1]):
            for i, digest in enumerate(hashes_of(prefix, 2), start=1):
                assert seen.setdefault(digest, tuple(prefix[: 2 * i])) == tuple(prefix[: 2 * i])
    assert len(next(iter(seen))) == DIGEST_BYTES


@given(TOKENS, st.integers(1, 4), st.data())
def test_hashes_grow_with_the_tokens_and_only_by_full_blocks(tokens: list[int], size: int, data: st.DataObject) -> None:
    hashes: list[bytes] = []
    cut = data.draw(st.integers(0, len(tokens)))
    extend_block_hashes(hashes, tokens[:cut], size)
    assert len(hashes) == cut // size
    extend_block_hashes(hashes, tokens, size)
    assert hashes == hashes_of(tokens, size)


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from cbatch.engine.cache.prefix import extend_block_hashes as f; h = []; f(h, [1, 2, 3, 4], 2); "
        "print(h[-1].hex())"
    )
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == hashes_of([1, 2, 3, 4], 2)[-1].hex()


def test_the_index_holds_one_block_for_each_content() -> None:
    index = PrefixIndex()
    a, b, c = hashes_of([1, 2, 3], 1)
    index.register(a, 10)
    index.register(a, 11)
    index.register(c, 12)
    assert index.find(a) == 10
    assert not index.holds(11)
    assert index.match([a, b, c]) == [10]
    index.forget(10)
    assert index.match([a, b, c]) == []
    assert (len(index), index.find(c)) == (1, 12)
