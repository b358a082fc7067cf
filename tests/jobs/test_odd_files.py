"""What lies at the places of a job's files and is none of its own: told before the model loads, and left as it was."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from cbatch.errors import CbatchError, OutputError, UsageError
from tests.jobs.jobkit import Bench, prompts

BESIDE = ["out.jsonl.lock", "out.jsonl.journal.jsonl", "out.jsonl.report.json", "out.jsonl.trace.jsonl.gz"]
TEMPORARY = [".out.jsonl.partial", ".out.jsonl.report.json.partial"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.write(prompts(3))
    return bench


@pytest.mark.parametrize("name", [*BESIDE, *TEMPORARY])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize("restart", [False, True])
def test_what_is_no_file_is_told_before_the_model_loads(bench: Bench, name: str, kind: str, restart: bool) -> None:
    path = bench.path / name
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(UsageError, match=r"is not a regular file.*move it away"):
        bench.run(restart=restart)
    assert bench.engines == []
    assert path.exists()


@pytest.mark.parametrize("length", [236, 250, 300])
def test_a_name_that_leaves_no_room_for_those_beside_it_is_told_before_the_model_loads(
    bench: Bench, length: int
) -> None:
    with pytest.raises(UsageError, match=r"File name too long \(choose a shorter name\)"):
        bench.run(output=str(bench.path / ("a" * (length - 6) + ".jsonl")))
    assert bench.engines == []


def test_a_file_where_the_folder_of_the_parts_should_be(bench: Bench) -> None:
    (bench.path / "out.jsonl.parts").write_text("mine")
    with pytest.raises(OutputError, match=r"cannot write .*out\.jsonl\.parts"):
        bench.run(shard="0/2")
    assert (bench.path / "out.jsonl.parts").read_text() == "mine"


@pytest.mark.parametrize("where", ["checkpoint_dir", "output"])
def test_a_file_where_a_folder_should_be(bench: Bench, where: str) -> None:
    (bench.path / "file").write_text("mine")
    value = bench.path / "file" if where == "checkpoint_dir" else bench.path / "file" / "out.jsonl"
    with pytest.raises(UsageError, match=r"is not a directory \(name another one\)"):
        bench.run(**{where: str(value)})


# Locks


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, os.urandom(5000), b"[" * 4096, b'{"host": ', b"\xff", b"[]"])
def test_a_lock_that_says_nothing_holds_nobody_up(bench: Bench, content: bytes) -> None:
    lock = bench.path / "out.jsonl.lock"
    lock.write_bytes(content)
    assert bench.run().exit_code == 0
    assert not lock.exists()


def test_a_lock_of_odd_values_is_one_line(bench: Bench) -> None:
    (bench.path / "out.jsonl.lock").write_text('{"host": ["a"], "pid": "\\u001b[31m", "started_at": {"b": 1}}')
    with pytest.raises(UsageError, match="another run holds"):
        bench.run()


# Journals


def line(body: str) -> bytes:
    """A line that is whole by its checksum."""
    data = body.encode() + b"\n"
    return b'{"crc": "%08x", ' % zlib.crc32(data) + data


@pytest.mark.parametrize(
    "content",
    [b"my notes\n", b"\x01" * 3000, b'{"id": 1}\n{"id": 2}\n', b"\n\nx", os.urandom(1) * 10**6 + b"\n"],
    ids=["text", "binary", "json", "after blank lines", "one long line"],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(bench: Bench, content: bytes) -> None:
    journal = bench.path / "out.jsonl.journal.jsonl"
    journal.write_bytes(content)
    with pytest.raises(UsageError, match=r"is no journal \(move it away, or pass --restart"):
        bench.run()
    assert journal.read_bytes() == content
    assert bench.engines == []
    assert bench.run(restart=True).exit_code == 0


@pytest.mark.parametrize(
    "body",
    [
        '"session": "one"}',
        '"foo": 1}',
        '"key": "00", "ok": true, "columns": {}, "result": {}}',
        '"key": 5}',
        '"key": "zz", "columns": {}, "result": {}}',
    ],
)
def test_a_journal_of_another_version_is_refused_and_left_alone(bench: Bench, body: str) -> None:
    journal = bench.path / "out.jsonl.journal.jsonl"
    content = line('"session": 1, "host": "node7"}') + line(body)
    journal.write_bytes(content)
    with pytest.raises(UsageError, match=r"written by another version.*--restart"):
        bench.run()
    assert journal.read_bytes() == content


def test_the_journal_of_another_job_is_used_for_what_it_has(bench: Bench) -> None:
    bench.run(output=str(bench.path / "other.jsonl"))
    (bench.path / "other.jsonl.journal.jsonl").rename(bench.path / "out.jsonl.journal.jsonl")
    bench.write(prompts(4))
    summary = bench.run()
    assert (summary.rows, summary.rows_replayed) == (4, 3)


# Reports


@pytest.mark.parametrize("content", ["", "[1]", "{", "null", '{"hashes": null}', '{"hashes": {}}', "[" * 10**6])
def test_an_odd_report_is_written_anew(bench: Bench, content: str) -> None:
    bench.run()
    (bench.path / "out.jsonl.report.json").write_text(content)
    assert bench.run().status == "done"
    assert bench.report()["rows"] == 3
    assert bench.num_prompts_run == 3


# Inputs


@pytest.mark.parametrize("name", ["", "a" * 300, "a" * 300 + "*.jsonl", "no/such\x00.jsonl"])
def test_a_name_that_no_file_can_have(bench: Bench, name: str) -> None:
    with pytest.raises(CbatchError):
        bench.run(inputs=(name,))
    assert bench.engines == []


def test_an_empty_name_is_not_taken_for_the_current_folder(bench: Bench) -> None:
    with pytest.raises(UsageError, match="the name of an input is empty"):
        bench.run(inputs=("",))
