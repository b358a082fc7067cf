"""Inputs behind URLs, through fsspec (an optional extra). Called by `cbatch.io.streams` and `cbatch.io.inputs`.

What the many file systems raise becomes OSError here, so that readers know one kind of failure.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable
from typing import Any, TypeVar

from cbatch.errors import UsageError

INSTALL = 'pip install "cbatch[remote]"'

_T = TypeVar("_T")


def is_url(name: str) -> bool:
    """Tell a URL (`s3://…`, `https://…`, `memory://…`) from a path."""
    return "://" in name


def open_remote(url: str) -> io.BufferedReader:
    """Open a remote file for reading. Raises UsageError for what is not installed or unknown, else OSError."""
    system, path = _file_system(url)
    return io.BufferedReader(_RemoteFile(_attempt(lambda: system.open(path, "rb"))))


def glob_remote(url: str) -> list[str]:
    """Return the URLs of the files that a remote pattern matches."""
    system, path = _file_system(url)
    found = _attempt(lambda: [system.unstrip_protocol(match) for match in system.glob(path)])
    return [str(match) for match in found]


def _file_system(url: str) -> tuple[Any, str]:
    try:
        fsspec = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise UsageError(f"reading {url} needs fsspec", hint=INSTALL) from error
    try:
        system, path = fsspec.url_to_fs(url)
    except ImportError as error:  # the message says which package the protocol needs
        hint = INSTALL if url.startswith(("http://", "https://")) else None
        raise UsageError(f"cannot read {url}: {error}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"cannot read {url}: {error}") from error
    return system, path


def _attempt(action: Callable[[], _T]) -> _T:
    """Run one remote operation; whatever it raises becomes an OSError."""
    try:
        return action()
    except OSError:
        raise
    except Exception as error:  # every file system has exceptions of its own
        raise OSError(f"{type(error).__name__}: {error}") from error


class _RemoteFile(io.RawIOBase):
    """A remote file as Python's buffered readers want it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(_attempt(lambda: self._file.seek(offset, whence)))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        data: bytes = _attempt(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
