"""A compressed file of JSON lines that is only ever appended to. Written by a job's trace, read by what looks at it.

Every `append` is a gzip member of its own, written at once: a killed process loses no more than the last one, and
`zcat` reads the rest. Opening the file again cuts off a member that a crash tore.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cbatch.errors import InputError
from cbatch.io import jsonform
from cbatch.io.atomic import writing
from cbatch.io.streams import reading

LEVEL = 5
READ_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


class GzipLog:
    """An open file that takes lines."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OutputError."""
        self.path = path
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = _whole_size(self._file)
            os.ftruncate(self._file, self._size)

    def append(self, lines: Iterable[bytes]) -> None:
        """Write lines, each with its newline. Raises OutputError; the file then ends before them."""
        data = gzip.compress(b"".join(lines), LEVEL, mtime=0)
        written = 0
        with writing(self.path):
            try:
                while written < len(data):
                    written += os.pwrite(self._file, data[written:], self._size + written)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += written

    def close(self) -> None:
        os.close(self._file)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a log, up to where a crash tore it. Raises InputError for what is none."""
    with reading(str(path)), path.open("rb") as file:
        rest = b""
        for chunk in _decompressed(file.fileno()):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield _parse(line, path)


def _parse(line: bytes, path: Path) -> dict[str, Any]:
    try:
        value = jsonform.load(line.decode())
    except ValueError as error:
        raise InputError(f"{path} holds a line that is not JSON") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a line that is not an object")
    return value


def _whole_size(file: int) -> int:
    """Find where the last whole member ends."""
    end = position = 0
    inflate = zlib.decompressobj(_GZIP)
    while chunk := os.pread(file, READ_BYTES, position):
        position += len(chunk)
        while chunk:
            try:
                inflate.decompress(chunk)
            except zlib.error:
                return end
            chunk = inflate.unused_data
            if inflate.eof:
                end = position - len(chunk)
                inflate = zlib.decompressobj(_GZIP)
    return end


def _decompressed(file: int) -> Iterator[bytes]:
    """Yield the content of all members; of a torn one at the end what can be had."""
    inflate = zlib.decompressobj(_GZIP)
    position, is_first = 0, True
    while chunk := os.pread(file, READ_BYTES, position):
        position += len(chunk)
        while chunk:
            try:
                yield inflate.decompress(chunk)
            except zlib.error:
                if is_first:
                    raise
                return
            chunk = inflate.unused_data
            if inflate.eof:
                inflate, is_first = zlib.decompressobj(_GZIP), False
