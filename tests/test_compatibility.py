"""Spec E21: what excludes what stands in one table, every line of it refuses, and the docs print it."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest

from cbatch.compatibility import EXCLUSIONS, Exclusion, Facts, check
from cbatch.errors import UsageError
from tests.conftest import ROOT

FLAGS = [field.name for field in fields(Facts) if field.name != "device"]


def facts_that(exclusion: Exclusion) -> Facts:
    """The fewest facts that an exclusion is about: two of them."""
    pairs = [{one: True, other: True} for one, other in product(FLAGS, FLAGS)]
    for known in [*pairs, *({flag: True, "device": device} for flag in FLAGS for device in ("cuda", "cpu"))]:
        facts = Facts(**known)  # type: ignore[arg-type]
        if exclusion.excludes(facts):
            return facts
    raise AssertionError(f"{exclusion.one} and {exclusion.other} exclude each other never")


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda e: f"{e.one} with {e.other}")
def test_every_exclusion_is_of_two_things_and_says_the_way_out(exclusion: Exclusion) -> None:
    facts = facts_that(exclusion)
    for flag in FLAGS:
        if getattr(facts, flag):
            alone = {name: getattr(facts, name) for name in (*FLAGS, "device") if name != flag}
            assert not exclusion.excludes(Facts(**alone)), "one of the two is fine"
    if exclusion.hint:
        with pytest.raises(UsageError) as raised:
            check(facts)
        assert raised.value.message == exclusion.why
        assert raised.value.hint == exclusion.hint
    else:
        check(facts)


def test_nothing_known_excludes_nothing() -> None:
    check(Facts())
    for flag in FLAGS:
        check(Facts(**{flag: True}))


def test_the_reference_prints_the_table() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert all(f"| {exclusion.one} | {exclusion.other} |" in text for exclusion in EXCLUSIONS)
