"""The journal gives every outcome back once, to the search that it belongs to, whatever a crash left of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbatch.errors import OutputError
from cbatch.tune.journal import DIED, TrialJournal
from cbatch.tune.trial import Outcome

SETTINGS = {"page_size": 16, "max_batch_tokens": 512}
FAST = Outcome(status="ok", timed_s=1.5, output_tokens=300, wall_s=2.0)
FAILED = Outcome(status="failed", reason="memory ran out", wall_s=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.toml.journal.jsonl"


def write(path: Path, key: str = "a") -> None:
    journal = TrialJournal(path, key)
    for rung, outcome in ((0, FAST), (0, FAILED), (1, FAST)):
        journal.note_start(SETTINGS, rung)
        journal.note_trial(SETTINGS, rung, outcome)
    journal.close()


def test_outcomes_come_back_once_and_in_order(path: Path) -> None:
    write(path)
    journal = TrialJournal(path, "a")
    assert journal.num_trials == 3
    assert journal.settings == [SETTINGS]
    assert journal.earlier_s == 4.5
    assert journal.has(SETTINGS, 0)
    reordered = dict(reversed(SETTINGS.items()))
    assert [journal.take(reordered, 0) for _ in range(3)] == [FAST, FAILED, None]
    assert not journal.has(SETTINGS, 0)
    assert journal.take(SETTINGS | {"page_size": 8}, 1) is None
    assert journal.take(SETTINGS, 1) == FAST
    journal.close()


def test_lines_of_another_search_stay_and_are_not_taken(path: Path) -> None:
    write(path)
    write(path, "b")
    for key in ("a", "b"):
        journal = TrialJournal(path, key)
        assert journal.num_trials == 3
        journal.close()
    other = TrialJournal(path, "c")
    assert (other.num_trials, other.sample, other.take(SETTINGS, 0)) == (0, None, None)
    other.close()


def test_the_sample_comes_back(path: Path) -> None:
    journal = TrialJournal(path, "a")
    journal.note_sample({"rows": [[3, 10], [1, 20]]}, 12.0)
    journal.close()
    again = TrialJournal(path, "a")
    assert again.sample == {"rows": [[3, 10], [1, 20]]}
    assert again.earlier_s == 12.0
    again.close()


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_tail_costs_one_line_and_no_more(path: Path, cut: int) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = TrialJournal(path, "a")
    lost = cut > 1  # without its newline a line is whole
    assert journal.num_trials == 3 - lost
    journal.note_trial(SETTINGS, 2, FAST)
    journal.close()
    again = TrialJournal(path, "a")
    assert again.num_trials == 4 - lost
    assert again.take(SETTINGS, 2) == FAST
    again.close()


def test_a_trial_that_ended_the_process_twice_has_failed(path: Path) -> None:
    for number in range(3):
        journal = TrialJournal(path, "a")
        assert journal.has(SETTINGS, 0) == (number == 2)
        expected = Outcome(status="failed", reason=DIED) if number == 2 else None
        assert journal.take(SETTINGS, 0) == expected
        journal.note_start(SETTINGS, 0)
        journal.close()


def test_one_that_was_stopped_in_order_has_not(path: Path) -> None:
    for _ in range(4):
        journal = TrialJournal(path, "a")
        assert journal.take(SETTINGS, 0) is None
        journal.note_start(SETTINGS, 0)
        journal.note_abandoned(SETTINGS, 0)
        journal.close()


def test_a_file_that_cannot_be_written_is_told(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        TrialJournal(tmp_path / "gone" / "journal.jsonl", "a")
    journal = TrialJournal(path, "a")
    write_all = os.write
    monkeypatch.setattr("os.write", lambda file, data: write_all(file, data[: len(data) // 2]))
    with pytest.raises(OutputError, match="No space left"):
        journal.note_trial(SETTINGS, 0, FAST)
    monkeypatch.undo()
    journal.note_trial(SETTINGS, 1, FAST)  # room was made
    journal.close()
    again = TrialJournal(path, "a")
    assert (again.num_trials, again.take(SETTINGS, 1)) == (1, FAST)
    again.close()
