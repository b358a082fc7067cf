"""Spec J1: the journal's rows survive whatever tears its end, and can be read at any time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import OutputError
from cbatch.jobs.journal import Entry, Head, Journal

TEXTS = ["plain", "é漢👍", "a\u2028b\u0085c\x0bd", 'quote " , "columns": {', "\udc00", "", "x" * 70_000]


def entry(number: int, text: str = "text") -> Entry:
    key, source = number.to_bytes(16, "big"), number.to_bytes(8, "big")
    head = Head(key, source, ok=number % 2 == 0, attempt=1, session=1, generate_s=1.25, computed_tokens=7)
    return Entry(head, {"id": number, "big": 2**70, "text": text}, {"row": number, "completion": text, "error": None})


def write(path: Path, num_rows: int = 3) -> list[int]:
    journal = Journal(path)
    journal.note_session(1, {"host": "node7"})
    offsets = [journal.append(entry(number, TEXTS[number % len(TEXTS)])) for number in range(num_rows)]
    journal.sync()
    journal.close()
    return offsets


def recover(path: Path) -> tuple[Journal, dict[int, int], int, int]:
    journal = Journal(path)
    found: dict[int, int] = {}
    recovery = journal.recover(lambda head, offset: found.update({int.from_bytes(head.key, "big"): offset}))
    return journal, found, recovery.num_sessions, recovery.num_damaged


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    offsets = write(tmp_path / "j", len(TEXTS))
    journal, found, num_sessions, num_damaged = recover(tmp_path / "j")
    assert found == dict(enumerate(offsets))
    assert (num_sessions, num_damaged) == (1, 0)
    for number, offset in found.items():
        reader = journal.reader()
        assert reader.read(offset) == entry(number, TEXTS[number])
        assert reader.has_key(offset, number.to_bytes(16, "big"))
        assert not reader.has_key(offset, (99).to_bytes(16, "big"))
        assert reader.has_source(offset, number.to_bytes(8, "big"))
        assert not reader.has_source(offset, (99).to_bytes(8, "big"))
    journal.close()


def test_every_line_is_json_for_line_based_tools(tmp_path: Path) -> None:
    write(tmp_path / "j", len(TEXTS))
    text = (tmp_path / "j").read_text(encoding="utf-8")
    assert len(text.splitlines()) == text.count("\n") == len(TEXTS) + 1
    values = [json.loads(line) for line in text.splitlines()]
    assert [value["result"]["completion"] for value in values if "key" in value] == TEXTS


def test_rows_can_be_read_while_the_journal_is_open(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(entry(5))
    journal.flush()
    assert json.loads((tmp_path / "j").read_bytes())["result"]["row"] == 5
    journal.close()


def torn_tails() -> dict[str, Any]:
    return {
        "mid-JSON": lambda data, last: data[: last + 60],
        "in the first bytes": lambda data, last: data[: last + 3],
        "mid-character": lambda data, last: data[: data.rindex("漢".encode()) + 1],
        "NULs at the end": lambda data, last: data[: last + 60] + bytes(4096),
        "NULs instead of the line": lambda data, last: data[:last] + bytes(100),
        "NULs and a newline": lambda data, last: data[: last + 60] + bytes(10) + b"\n",
        "a flipped bit": lambda data, last: data[: last + 80] + bytes([data[last + 80] ^ 1]) + data[last + 81 :],
        "another program's line": lambda data, last: data[:last] + b'{"key": 1}\n',
        "not UTF-8": lambda data, last: data[:last] + b"\xff\xfe\n",
    }


@pytest.mark.parametrize("kind", torn_tails())
def test_a_torn_tail_costs_its_row_only_and_is_cut_off(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "j"
    offsets = write(path, 9)
    path.write_bytes(torn_tails()[kind](path.read_bytes(), offsets[-1]))
    journal, found, _, _ = recover(path)
    assert found == dict(enumerate(offsets[:-1]))
    assert path.stat().st_size == offsets[-1]
    again = journal.append(entry(8))
    journal.flush()
    journal.close()
    assert recover(path)[1] == {**dict(enumerate(offsets[:-1])), 8: again}


def test_a_complete_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    offsets = write(path)
    path.write_bytes(path.read_bytes()[:-1])
    journal, found, _, num_damaged = recover(path)
    assert found == dict(enumerate(offsets))
    assert num_damaged == 0
    journal.append(entry(3))
    journal.flush()
    journal.close()
    assert set(recover(path)[1]) == {0, 1, 2, 3}


@pytest.mark.parametrize("hole", [bytes(40), b"garbage\n", b"\n\n"])
def test_a_damaged_line_in_the_middle_costs_no_other(tmp_path: Path, hole: bytes) -> None:
    path = tmp_path / "j"
    offsets = write(path, 5)
    data = path.read_bytes()
    at = offsets[2] + 30
    path.write_bytes(data[:at] + hole + data[at + len(hole) :])
    _, found, _, num_damaged = recover(path)
    assert set(found) >= {0, 1, 4}
    assert 2 not in found
    assert num_damaged >= 1


@pytest.mark.parametrize("kept", [0, 2])
def test_what_no_crash_did_is_not_cut_off(tmp_path: Path, kept: int) -> None:
    """As where an editor of another system has saved it: the lines may be mended by hand."""
    path = tmp_path / "j"
    offsets = write(path, 5)
    data = path.read_bytes()
    start = offsets[kept] if kept else 0
    damaged = data[:start] + data[start:].replace(b"\n", b"\r\n") + b'{"crc": "torn'
    path.write_bytes(damaged)
    journal, found, _, num_damaged = recover(path)
    assert found == dict(enumerate(offsets[:kept]))
    assert num_damaged == (5 - kept if kept else 6) + 1
    assert path.read_bytes() == damaged[: damaged.rindex(b"\n") + 1]
    again = journal.append(entry(7))
    journal.flush()
    journal.close()
    assert recover(path)[1] == {**dict(enumerate(offsets[:kept])), 7: again}


@pytest.mark.parametrize("cut", range(0, 700, 7))
def test_every_cut_is_recovered(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    offsets = write(path, 3)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    journal, found, _, _ = recover(path)
    ends = [*offsets[1:], len(data)]
    assert found == {number: at for number, at in enumerate(offsets) if cut >= ends[number] - 1}
    journal.append(entry(77))
    journal.flush()
    journal.close()
    assert set(recover(path)[1]) == {*found, 77}


def test_an_empty_file_and_none_start_fresh(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("empty", "none"):
        journal, found, num_sessions, _ = recover(tmp_path / name)
        assert (found, num_sessions) == ({}, 0)
        journal.close()


def test_a_full_disk_is_said_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.append(entry(0))
    journal.flush()
    room = [path.stat().st_size * 3 // 2]
    real = os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, data[: room[0]], offset)
        room[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    journal.append(entry(1))
    journal.append(entry(2))
    with pytest.raises(OutputError, match=r"No space left.*run the same command again"):
        journal.flush()
    monkeypatch.undo()
    assert path.read_bytes().endswith(b"\n")
    journal.append(entry(3))
    journal.flush()
    journal.close()
    assert set(recover(path)[1]) == {0, 1, 3}


def test_a_window_sees_what_was_written_behind_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    reader = journal.reader()
    for number in range(50):
        offset = journal.append(entry(number, "x" * 3000 * (number % 4)))
        journal.flush()
        assert reader.read(offset).result["row"] == number
    journal.close()


def test_a_row_is_durable_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    clock = [100.0]
    monkeypatch.setattr("cbatch.jobs.journal.time.monotonic", lambda: clock[0])
    journal = Journal(tmp_path / "j")
    synced.clear()
    journal.append(entry(0))
    journal.keep_up(idle=False)
    clock[0] += 0.5
    journal.keep_up(idle=False)
    assert len(synced) == 1
    assert (tmp_path / "j").stat().st_size > 0
    clock[0] += 5
    journal.keep_up(idle=True)
    assert len(synced) == 1, "nothing new, nothing to sync"
    journal.close()


def test_a_directory_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        Journal(tmp_path / "no" / "j")
