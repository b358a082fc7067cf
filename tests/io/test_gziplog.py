"""An append-only compressed log: what a kill loses, and what is never lost."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from cbatch.errors import InputError, OutputError
from cbatch.io.gziplog import GzipLog, read_log


def write(path: Path, *batches: list[int]) -> None:
    log = GzipLog(path)
    for batch in batches:
        log.append(b'{"n": %d}\n' % n for n in batch)
    log.close()


def numbers(path: Path) -> list[int]:
    return [value["n"] for value in read_log(path)]


def test_it_goes_on_where_it_was_and_gzip_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    write(path, [1, 2], [3])
    write(path, [4])
    assert numbers(path) == [1, 2, 3, 4]
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 4


def test_whatever_a_kill_left_the_whole_batches_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    write(path, [1, 2])
    first = path.stat().st_size
    write(path, list(range(3, 300)))
    whole = path.read_bytes()
    for size in (*range(first, len(whole), 37), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert numbers(path)[:2] == [1, 2]
        assert numbers(path) == list(range(1, len(numbers(path)) + 1)), "what of the torn batch can be read is right"
        write(path, [7])
        assert numbers(path) == [1, 2, 7], "the torn batch is cut off"
    path.write_bytes(whole)
    write(path, [7])
    assert numbers(path) == [*range(1, 300), 7]


@pytest.mark.parametrize("tail", [b"\x00" * 100, b"rubbish", b"\x1f\x8b"])
def test_what_a_power_cut_left_behind_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log.gz"
    write(path, [1])
    with path.open("ab") as file:
        file.write(tail)
    assert numbers(path) == [1]
    write(path, [2])
    assert numbers(path) == [1, 2]


@pytest.mark.parametrize(
    "content", [b"plain text\n", gzip.compress(b"no json\n", mtime=0), gzip.compress(b"[1]\n", mtime=0)]
)
def test_what_is_no_log_is_said_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"log\.gz"):
        numbers(path)
    with pytest.raises(InputError, match="no such file"):
        numbers(tmp_path / "other")


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.gz"
    log = GzipLog(path)
    log.append([b'{"n": 1}\n'])
    write_some = os.pwrite

    def fail_halfway(file: int, data: bytes, offset: int) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write_some(file, data[:10], offset)

    monkeypatch.setattr(os, "pwrite", fail_halfway)
    with pytest.raises(OutputError, match="No space left"):
        log.append([b'{"n": 2}\n'])
    monkeypatch.undo()
    log.append([b'{"n": 3}\n'])
    assert numbers(path) == [1, 3]
