"""Spec J1, E19: keys, occurrences and derived seeds, and the memory that they take."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cbatch.errors import RowError
from cbatch.jobs.compact import FlatTable, PartitionedTable
from cbatch.jobs.keys import base_key, failed_key, row_key, row_seed, row_source
from cbatch.jobs.ledger import Claim, Ledger
from cbatch.jobs.rendering import Rendered

TEXT = Rendered("text", "hello")


def test_the_key_changes_with_prompt_parameters_and_model_only() -> None:
    base = base_key(TEXT, {"max_tokens": 5}, b"model")
    assert len(base) == 16
    assert base == base_key(Rendered("text", "hello"), {"max_tokens": 5}, b"model")
    others = [
        base_key(Rendered("text", "hello "), {"max_tokens": 5}, b"model"),
        base_key(TEXT, {"max_tokens": 6}, b"model"),
        base_key(TEXT, {}, b"model"),
        base_key(TEXT, {"max_tokens": 5}, b"other"),
        failed_key(RowError("bad", "hello"), {}, b"model"),
    ]
    assert len({base, *others}) == 6


def test_keys_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert base_key(TEXT, {"stop": ("a",)}, b"model").hex() == "e7ba9281726bb5eedade48731fa56bba"
    assert row_seed(0, b"k" * 16) == 2251371058871893599


def test_derived_seeds_fit_a_signed_integer_and_differ() -> None:
    seeds = {row_seed(job, row_key(b"base", number)) for job in range(3) for number in range(300)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)


def bases(letters: str) -> list[bytes]:
    return [letter.encode() * 16 for letter in letters]


def test_equal_rows_have_keys_of_their_own() -> None:
    ledger = Ledger()
    keys = [ledger.claim(base).key for base in bases("abaaba")]
    assert len(set(keys)) == 6
    assert keys[:2] == bases("ab")


@given(st.text("abcd", max_size=40), st.text("abcd", max_size=10), st.sets(st.integers(0, 39)))
def test_a_resumed_input_meets_its_finished_rows_once_each(rows: str, appended: str, finished: set[int]) -> None:
    first = Ledger()
    keys = [first.claim(base).key for base in bases(rows)]
    offsets = {keys[place]: place * 10 for place in finished if place < len(keys)}
    resumed = Ledger(len(offsets))
    for key, offset in offsets.items():
        resumed.add(key, offset, 1)
    claims = [resumed.claim(base) for base in bases(rows + appended)]
    assert [claim.key for claim in claims[: len(keys)]] == keys
    assert [claim.offset for claim in claims] == [offsets.get(claim.key) for claim in claims]
    assert len({claim.key for claim in claims}) == len(claims)
    assert resumed.num_replayed == len(offsets)


def test_a_finished_row_is_taken_only_if_its_whole_key_is_right() -> None:
    asked: list[tuple[int, bytes]] = []

    def verify(offset: int, key: bytes) -> bool:
        asked.append((offset, key))
        return key == b"a" * 16

    ledger = Ledger(2, verify)
    ledger.add(b"a" * 16, 7, 1)
    assert ledger.claim(b"a" * 8 + b"b" * 8) == Claim(b"a" * 8 + b"b" * 8, None)
    assert asked


def test_a_row_to_retry_is_run_again_and_knows_how_often_it_was() -> None:
    ledger = Ledger(2)
    ledger.add(b"a" * 16, 7, 1, retry=True)
    ledger.add(b"a" * 16, 2**40, 3, retry=True)
    ledger.add(b"b" * 16, 2**45, 2)
    assert ledger.claim(b"a" * 16) == Claim(b"a" * 16, None, 3)
    assert ledger.claim(b"b" * 16) == Claim(b"b" * 16, 2**45, 2)
    assert ledger.claim(b"a" * 16).num_attempts == 0, "the second occurrence never ran"


def test_a_row_that_moved_keeps_its_answer_and_runs_again_only_if_it_failed() -> None:
    ledger = Ledger(2, has_source=lambda _offset, source: source == b"here")
    ledger.add(b"a" * 16, 7, 1)
    ledger.add(b"b" * 16, 8, 1)
    ledger.add(b"c" * 16, 9, 1, ok=False)
    assert ledger.claim(b"a" * 16, b"here") == Claim(b"a" * 16, 7, 1)
    assert ledger.claim(b"b" * 16, b"there") == Claim(b"b" * 16, 8, 1, moved=True)
    assert ledger.claim(b"c" * 16, b"there") == Claim(b"c" * 16, None, 1)


def test_the_source_of_a_row_is_its_place_and_all_of_its_columns() -> None:
    rows: list[tuple[int, dict[str, object]]] = [(0, {"a": 1}), (1, {"a": 1}), (0, {"a": 2}), (0, {"a": 1, "b": 2})]
    sources = [row_source(*row) for row in rows]
    assert len(set(sources)) == len(sources)
    assert row_source(0, {"a": 1}) == sources[0]
    assert row_source(0, {"a": "\udc00", "b": float("nan"), "c": b"\xff"})  # whatever a row can hold


@given(st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**32]), max_size=200))
def test_tables_hold_what_a_dict_holds(marks: list[int]) -> None:
    for table in (FlatTable("q"), PartitionedTable("q"), FlatTable("q", len(marks))):
        plain: dict[int, int] = {}
        for number, mark in enumerate(marks):
            table.put(mark, number)
            plain[mark or 1] = number
        assert len(table) == len(plain)
        assert all(table.get(mark) == plain[mark or 1] for mark in marks)
        assert table.get(12345678901234567890) == plain.get(12345678901234567890)


def test_the_memory_of_keys_stays_in_its_budget() -> None:
    rng = random.Random(1)
    num_rows = 60_000
    distinct = [rng.randbytes(16) for _ in range(num_rows)]
    fresh = Ledger()
    for base in distinct:
        fresh.claim(base)
    assert fresh.num_bytes <= 14 * num_rows
    resumed = Ledger(num_rows)
    for offset, base in enumerate(distinct):
        resumed.add(base, offset, 1)
    for base in distinct:
        assert resumed.claim(base).offset is not None
    assert resumed.num_bytes <= 21 * num_rows
    twice = Ledger()
    counts: Counter[bytes] = Counter()
    for base in distinct[: num_rows // 2] * 2:
        counts[twice.claim(base).key] += 1
    assert max(counts.values()) == 1
    assert twice.num_bytes <= 18 * num_rows
