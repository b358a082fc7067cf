"""Choosing among configurations with a clock of the test's: the fastest one, kept for the next process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cbatch_kernels.tuned_choices import TunedChoices, Values, fingerprint

CANDIDATES = [(64, 4), (32, 8), (16, 2)]


class Machine:
    """Runs candidates and says how long they take."""

    def __init__(self, seconds: dict[Values, float]) -> None:
        self._seconds = seconds
        self.ran: list[Values] = []

    def run(self, values: Values) -> None:
        self.ran.append(values)
        if values not in self._seconds:
            raise RuntimeError("out of resource: shared memory")

    def clock(self, call: Callable[[], object]) -> float:
        call()
        return self._seconds[self.ran[-1]]

    def choose(self, file: Path | None, key: str = "a kernel") -> Values:
        return TunedChoices(file).choose(key, CANDIDATES, self.run, self.clock)


def test_the_fastest_is_chosen_and_the_next_process_times_nothing(tmp_path: Path) -> None:
    machine = Machine({(64, 4): 3.0, (32, 8): 1.0, (16, 2): 2.0})
    file = tmp_path / "cache" / "choices.json"
    assert machine.choose(file) == (32, 8)
    assert machine.ran == CANDIDATES
    assert machine.choose(file) == (32, 8)
    assert machine.ran == CANDIDATES
    assert TunedChoices(file).get("a kernel") == (32, 8)
    assert TunedChoices(file).get("another") is None
    assert [path.name for path in file.parent.iterdir()] == ["choices.json"]


def test_what_cannot_run_is_no_choice(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    assert Machine({(16, 2): 2.0}).choose(file) == (16, 2)
    assert Machine({}).choose(file, "another") == (64, 4), "the fixed one, where none can"
    assert TunedChoices(file).get("another") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a kernel": 7}', '{"a kernel": ["x"]}', '{"a kernel": [1, 2]}'])
def test_a_file_that_says_nothing_of_use_is_timed_anew(content: str, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    assert Machine({(64, 4): 2.0, (16, 2): 1.0}).choose(file) == (16, 2)
    assert json.loads(file.read_text())["a kernel"] == [16, 2]


def test_processes_that_start_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    one, other = TunedChoices(file), TunedChoices(file)
    machine = Machine({(64, 4): 2.0, (16, 2): 1.0})
    one.choose("one", CANDIDATES, machine.run, machine.clock)
    other.choose("other", CANDIDATES, machine.run, machine.clock)
    assert (TunedChoices(file).get("one"), TunedChoices(file).get("other")) == ((16, 2), (16, 2))


def test_where_nothing_can_be_written_the_choice_holds_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for file in (None, tmp_path / "a file" / "choices.json"):
        choices = TunedChoices(file)
        machine = Machine({(32, 8): 1.0})
        for _ in range(2):
            assert choices.choose("a kernel", CANDIDATES, machine.run, machine.clock) == (32, 8)
        assert machine.ran == CANDIDATES


def test_other_kernels_or_another_card_have_another_file(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("one")
    first = fingerprint([source], "a card", "3.7.1")
    assert first == fingerprint([source], "a card", "3.7.1")
    assert first != fingerprint([source], "another card", "3.7.1")
    source.write_text("two")
    assert first != fingerprint([source], "a card", "3.7.1")
