"""Bytes in: a file, standard input or a remote URL, decompressed. Called by the readers of the single formats.

Compression is told by the first bytes, never by the name. A failure in the middle is an InputError after every byte
that could still be read.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cbatch.errors import InputError
from cbatch.io.remote import is_url, open_remote

STDIN = "-"
STDIN_FILENO = 0
CHUNK_BYTES = 1 << 20
# pyarrow drops what a failing read had decoded so far: before a cut at most this is lost, and still 200 MB/s are read.
ZSTD_CHUNK_BYTES = 1 << 8


def _read_gzip(stream: io.BufferedReader) -> Iterator[bytes]:
    """All members; zeros after the last one are padding."""
    with gzip.GzipFile(fileobj=stream) as members:
        while chunk := members.read1(CHUNK_BYTES):
            yield chunk


def _read_zstd(stream: io.BufferedReader) -> Iterator[bytes]:
    """All frames, skippable ones left out."""
    import pyarrow as pa

    with pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd") as frames:
        while chunk := frames.read(ZSTD_CHUNK_BYTES):
            yield chunk


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a stream's first bytes say about it: how it is read, or what the user can do instead."""

    magic: bytes
    name: str
    read: Callable[[io.BufferedReader], Iterator[bytes]] | None
    hint: str | None = None


ENCODINGS = (
    Encoding(b"\x1f\x8b", "gzip", _read_gzip),
    Encoding(b"\x28\xb5\x2f\xfd", "zstd", _read_zstd),
    Encoding(b"BZh", "a bzip2 file", None, "decompress it first: bunzip2 {name}"),
    Encoding(b"\xfd7zXZ\x00", "an xz file", None, "decompress it first: unxz {name}"),
    Encoding(b"PK\x03\x04", "a zip archive", None, "unpack it first: unzip {name}"),
    Encoding(b"PAR1", "Parquet, which cannot be read from a stream", None, "name the file itself"),
    Encoding(b"\xff\xfe", "UTF-16 text", None, "convert it first: iconv -f UTF-16 -t UTF-8 {name}"),
    Encoding(b"\xfe\xff", "UTF-16 text", None, "convert it first: iconv -f UTF-16 -t UTF-8 {name}"),
)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn what fails while the input `name` is read into InputError."""
    name = "standard input" if name == STDIN else name
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"cannot read {name}: no such file") from error
    except EOFError as error:
        raise _cut_off(name) from error
    except (OSError, zlib.error) as error:
        if "Truncated compressed stream" in str(error):  # pyarrow's EOFError
            raise _cut_off(name) from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read {name}: {reason}") from error


@contextmanager
def open_binary(name: str) -> Iterator[io.BufferedReader]:
    """Open an input for reading, its first bytes peekable. What fails inside is an InputError."""
    with reading(name):
        if name == STDIN:
            # A buffer of our own: sys.stdin's is locked by a thread that waits for input, and Python's end needs it.
            with os.fdopen(STDIN_FILENO, "rb", closefd=False) as stream:
                yield stream
        else:
            with open_remote(name) if is_url(name) else Path(name).open("rb") as stream:
                yield stream


def read_chunks(name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the decompressed bytes of an input, up to so many at a time where it is not compressed.

    Raises InputError where it cannot be read further.
    """
    with open_binary(name) as stream:
        head = stream.peek(max(len(encoding.magic) for encoding in ENCODINGS))
        encoding = next((encoding for encoding in ENCODINGS if head.startswith(encoding.magic)), None)
        if encoding is None:
            while chunk := stream.read1(chunk_bytes):
                yield chunk
        elif encoding.read is not None:
            yield from encoding.read(stream)
        else:
            raise InputError(f"{name} is {encoding.name}", hint=(encoding.hint or "").format(name=name))


def _cut_off(name: str) -> InputError:
    return InputError(f"{name} is cut off: its compressed data ends early", hint="the rows before the cut were read")
