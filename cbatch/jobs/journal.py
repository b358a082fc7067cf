"""The journal: every finished row, appended as one line of JSON and durable within a second; what a job resumes from.

A line is `{"crc": …, "key": …, <what the job needs to know>, "columns": {the input's}, "result": {ours}}`, so that
finished rows can be read at any time (`jq 'select(.key) | .result.completion'`). One that starts a session has no key.
Written by the job's writer only; read again at the start of a run and when the output is put together.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cbatch.errors import OutputError, UsageError
from cbatch.io import jsonform
from cbatch.io.atomic import fsync_directory, writing

SYNC_INTERVAL_S = 0.5  # so that a row is durable within a second even where syncing takes a while
READ_BYTES = 1 << 20  # when everything is read
WINDOW_BYTES = 1 << 18  # when entries are read one by one
LINE_BYTES = 1 << 12  # of an entry, at first
MAX_PENDING_BYTES = 1 << 18
_CRC = '{"crc": "%08x", '
_CRC_BYTES = len(_CRC % 0)
_FIRST_BYTES = _CRC.partition("%")[0].encode()
_KEY_START = b'"key": "'
_HEAD_END = b', "columns": '
_KEY_HEX = 32
_SOURCE_START = b'", "source": "'
_SOURCE_HEX = 16


@dataclass(frozen=True, slots=True)
class Head:
    """What a job needs to know of a finished row without reading all of it."""

    key: bytes
    source: bytes  # the place and the columns of the row of the input, hashed
    ok: bool
    attempt: int  # how often it was run, from 1
    session: int  # the number of the process that ran it, from 1
    generate_s: float = 0.0  # seconds of generation in that session when it finished
    computed_tokens: int = 0
    num_dropped: int = 0  # prompt tokens cut off
    has_token_ids: bool = False
    has_nulled: bool = False  # whether columns held numbers that JSON lacks, which are null here
    fit: str | None = None  # how it was made to fit, where the context decided over it

    def as_dict(self) -> dict[str, Any]:
        """Return the line's first fields."""
        hashes = {"key": self.key.hex(), "source": self.source.hex()}
        return hashes | {name: getattr(self, name) for name in _HEAD_FIELDS}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Head:
        """Read what `as_dict` gave. Raises KeyError, TypeError and ValueError for anything else."""
        others = {name: values[name] for name in _HEAD_FIELDS}
        if not all(isinstance(others[name], int) for name in ("ok", "attempt", "session")):
            raise TypeError
        return cls(bytes.fromhex(values["key"]), bytes.fromhex(values["source"]), **others)


_HEAD_FIELDS = tuple(field.name for field in fields(Head))[2:]


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished row: its head, the input's columns and ours."""

    head: Head
    columns: dict[str, Any]
    result: dict[str, Any]


def _as_dict(entry: Entry) -> dict[str, Any]:
    return {**entry.head.as_dict(), "columns": entry.columns, "result": entry.result}


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found in a journal that was there already."""

    num_sessions: int
    num_damaged: int  # lines that a crash tore
    facts: dict[str, Any]  # what the last session wrote down of itself


class Journal:
    """An append-only file of entries, addressed by their offset."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OutputError."""
        self.path = path
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = os.fstat(self._file).st_size
            fsync_directory(path.parent)
        self._pending = bytearray()  # entries not handed to the system yet; they go after _size
        self._synced_size = self._size
        self._synced_at = time.monotonic()

    def count_lines(self) -> int:
        """Count the lines, to make room for what they hold."""
        return sum(chunk.count(b"\n") for _, chunk in self._chunks()) + 1

    def recover(self, add: Callable[[Head, int], None]) -> Recovery:
        """Give every whole entry with its offset to `add`, in order, and cut off what a crash left at the end.

        That is a line at most: more of them were damaged by something else, and stay. Raises UsageError, and leaves the
        file as it is, where that is no journal, or one of another version.
        """
        num_sessions = num_damaged = good_end = damaged_end = num_damaged_last = 0
        facts: dict[str, Any] = {}
        complete = True
        for offset, line in self._lines():
            head = self._parse_head(line)
            if head is None:
                num_damaged += bool(line.strip(b"\x00\n"))
                if line.endswith(b"\n"):
                    damaged_end, num_damaged_last = offset + len(line), num_damaged_last + 1
                continue
            num_damaged_last = 0
            if isinstance(head, dict):
                num_sessions = max(num_sessions, head.pop("session"))
                facts |= head
            else:
                add(head, offset)
                num_sessions = max(num_sessions, head.session)
            good_end, complete = offset + len(line), line.endswith(b"\n")
        if good_end == 0 and not self._may_begin_a_journal():
            raise UsageError(f"{self.path} is no journal", hint="move it away, or pass --restart to replace it")
        if num_damaged_last > 1:
            good_end, complete = damaged_end, True
        with writing(self.path):
            if good_end != self._size:
                os.ftruncate(self._file, good_end)
            self._size = good_end
            if not complete:
                self._write(b"\n")
        return Recovery(num_sessions, num_damaged, facts)

    def note_session(self, number: int, facts: dict[str, Any]) -> None:
        """Write down the process that works on the job, or more about it."""
        self._append({"session": number, **facts})
        self.sync()

    def append(self, entry: Entry) -> int:
        """Add an entry and return its offset; written by the next `flush`, durable after `sync`. Raises OutputError."""
        try:
            return self._append(_as_dict(entry))
        except ValueError:  # a number that JSON does not have
            head = replace(entry.head, has_nulled=True)
            return self._append(jsonform.without_non_finite(_as_dict(replace(entry, head=head))))

    def flush(self) -> None:
        """Hand everything to the system: a killed process no longer loses it. Raises OutputError."""
        if self._pending:
            data, self._pending = bytes(self._pending), bytearray()
            self._write(data)

    def reader(self) -> JournalReader:
        """Return a reader of what was flushed; one for each thread."""
        return JournalReader(self._file, self.path)

    def sync(self) -> None:
        """Make everything durable. Raises OutputError."""
        self.flush()
        if self._size != self._synced_size:
            with writing(self.path):
                os.fsync(self._file)
        self._synced_size, self._synced_at = self._size, time.monotonic()

    def keep_up(self, *, idle: bool) -> None:
        """Flush where the caller is idle or much waits; sync where the last time was long enough ago."""
        if idle or len(self._pending) >= MAX_PENDING_BYTES:
            self.flush()
        if time.monotonic() - self._synced_at >= SYNC_INTERVAL_S:
            self.sync()

    def close(self) -> None:
        """Close the file; without a sync before it, the last rows may be lost with the machine."""
        os.close(self._file)

    def _append(self, value: dict[str, Any]) -> int:
        body = jsonform.dump_exactly(value).encode()[1:] + b"\n"
        offset = self._size + len(self._pending)
        self._pending += (_CRC % zlib.crc32(body)).encode() + body
        return offset

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._size + written)
        except OSError as error:
            whole = data.rfind(b"\n", 0, written) + 1
            os.ftruncate(self._file, self._size + whole)
            self._size += whole
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}",
                hint="the rows before it are safe; make room and run the same command again to go on",
            ) from error
        self._size += written

    def _may_begin_a_journal(self) -> bool:
        """Whether the file begins as a journal does, as far as a crash let it."""
        start = os.pread(self._file, len(_FIRST_BYTES), 0)
        return not start.strip(b"\x00") or _FIRST_BYTES.startswith(start)

    def _parse_head(self, line: bytes) -> Head | dict[str, Any] | None:
        """Return an entry's head, what a session wrote down of itself, or None for a line that is not whole."""
        if not _is_whole(line):
            return None
        body = line[_CRC_BYTES:]
        try:
            if body.startswith(_KEY_START):
                return Head.from_dict(json.loads(b"{" + body[: body.index(_HEAD_END)] + b"}"))
            facts: dict[str, Any] = json.loads(b"{" + body)
            if isinstance(facts["session"], int):
                return facts
        except (KeyError, TypeError, ValueError):
            pass
        raise UsageError(
            f"{self.path} was written by another version of cbatch",
            hint="finish the job with that one, or pass --restart to run it anew",
        )

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of every line, the newline included where there is one."""
        pending: list[bytes] = []
        offset = 0
        for _, chunk in self._chunks():
            first, *rest = chunk.split(b"\n")
            pending.append(first)
            for piece in rest:
                line = b"".join(pending) + b"\n"
                yield offset, line
                offset += len(line)
                pending = [piece]
        if last := b"".join(pending):
            yield offset, last

    def _chunks(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        while chunk := os.pread(self._file, READ_BYTES, start):
            yield start, chunk
            start += len(chunk)


class JournalReader:
    """Reads entries by their offset, cheaply where they are asked for in order."""

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path
        self._start = 0
        self._window = b""

    def has_key(self, offset: int, key: bytes) -> bool:
        """Say whether the entry at an offset is the one with this key."""
        return self._bytes(offset + _CRC_BYTES + len(_KEY_START), _KEY_HEX) == key.hex().encode()

    def has_source(self, offset: int, source: bytes) -> bool:
        """Say whether the row of the entry at an offset had this place and these columns."""
        start = offset + _CRC_BYTES + len(_KEY_START) + _KEY_HEX + len(_SOURCE_START)
        return self._bytes(start, _SOURCE_HEX) == source.hex().encode()

    def read(self, offset: int) -> Entry:
        """Read an entry back."""
        value = jsonform.load(self._line(offset).decode())
        return Entry(Head.from_dict(value), value["columns"], value["result"])

    def _line(self, offset: int) -> bytes:
        size = LINE_BYTES
        while True:
            data = self._bytes(offset, size)
            end = data.find(b"\n")
            if end >= 0:
                assert _is_whole(data[: end + 1]), f"no entry at {offset} of {self._path}"
                return data[:end]
            assert len(data) == size, f"the entry at {offset} of {self._path} has no end"
            size *= 4

    def _bytes(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes at an offset, out of the window where it has them."""
        at = offset - self._start
        if not (at >= 0 and at + size <= len(self._window)):
            self._start, at = offset, 0
            self._window = os.pread(self._file, max(size, WINDOW_BYTES), offset)
        return self._window[at : at + size]


def _is_whole(line: bytes) -> bool:
    """Whether a line, its newline aside, is as it was written."""
    body = line[_CRC_BYTES:]
    return line[:_CRC_BYTES] == (_CRC % zlib.crc32(body if body.endswith(b"\n") else body + b"\n")).encode()
