"""A file that appears complete or not at all. Called by the sinks and by whoever writes beside the output.

Written under a temporary name in the target's own directory (a rename cannot cross file systems), then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from cbatch.errors import OutputError, UsageError

_SCHEME = re.compile(r"(^|/)[a-z][a-z0-9+.-]+:/")  # of what was a URL before it was taken for a path
# Some network file systems do not know it; a directory that may be written but not listed cannot be opened.
_CANNOT_SYNC_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


class AtomicFile:
    """A temporary file beside `path`, moved there by `commit()`; leaving the `with` block without it removes the file.

    A symlink is followed, so that the file it names is replaced. The temporary name is fixed: what a killed run left
    is overwritten by the next (whoever may run twice at once holds a lock). Raises OutputError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self.temporary = temporary_path(self._target)
        with writing(path):
            self.file: BinaryIO = self.temporary.open("wb")

    def commit(self) -> None:
        """Make the content durable and move it to its final place."""
        with writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self._keep_mode()
            self.file.close()
            self.temporary.replace(self._target)
            fsync_directory(self._target.parent)

    def abort(self) -> None:
        """Remove the temporary file; does nothing after `commit()`."""
        with contextlib.suppress(OSError):  # a full disk fails again on the flush that closing does
            self.file.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def _keep_mode(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self.file.fileno(), stat.S_IMODE(self._target.stat().st_mode))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while `path` is written into OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def fsync_directory(directory: Path) -> None:
    """Make a rename or a new file in `directory` durable, where its file system can."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_DIRECTORIES:
            raise


def write_json(path: Path, value: object) -> None:
    """Write a value for people and programs to read; the file appears complete. Raises OutputError."""
    with AtomicFile(path) as file:
        file.file.write(json.dumps(value, indent=2).encode() + b"\n")
        file.commit()


def temporary_path(target: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return target.with_name(f".{target.name}.partial")


def check_writable(path: Path) -> None:
    """Write, sync and remove a trial file beside `path`. Raises UsageError and OutputError, before anything costly."""
    target = Path(os.path.realpath(path))
    with _trying(path):
        if target.is_dir():
            raise UsageError(f"the output {path} is a directory", hint=f"name a file in it: -o {path}/out.jsonl")
        if target.exists() and not target.is_file():
            raise UsageError(f"the output {path} is not a regular file", hint="name a file that can be replaced")
        if os.path.ismount(target):  # Path.is_mount looks at directories only
            raise UsageError(f"the output {path} is a mount of its own, not to be replaced", hint="mount its directory")
        check_folder(target.parent, "the output's directory")
        trial = target.with_name(f".{target.name}.trial-{os.getpid()}")
        try:
            with trial.open("wb") as file:
                file.write(b"trial")
                file.flush()
                os.fsync(file.fileno())
        finally:
            trial.unlink(missing_ok=True)


def check_target(path: Path, others: Mapping[str, str]) -> None:
    """Check, by trial, that a file can be written and is none of `others`, names of files and what they are.

    Raises UsageError and OutputError.
    """
    check_writable(path)
    for name, what in others.items():
        if is_same_file(name, path):
            raise UsageError(f"{what} {name} would be overwritten", hint="name another output")


def is_same_file(name: str, path: Path) -> bool:
    """Tell whether a file is there that both name."""
    try:
        return Path(name).samefile(path)
    except (OSError, ValueError):
        return False


def check_folder(folder: Path, role: str) -> None:
    """Check that a folder is there. Raises UsageError and OutputError."""
    with _trying(folder):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{role} {folder} is not a directory", hint="name another one")
        if not folder.exists() and _SCHEME.search(str(folder)):
            raise UsageError(f"{role} {folder} seems to be a URL", hint="name a local file, and copy it from there")
        if not folder.exists():
            raise UsageError(f"{role} {folder} does not exist", hint=f"mkdir -p {folder}")


def check_free(path: Path) -> None:
    """Check that a file can have this name: that nothing but a regular file has it. Raises UsageError, OutputError."""
    with _trying(path):
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file, and a file is to have its name", hint="move it away")


@contextmanager
def _trying(path: Path) -> Iterator[None]:
    """Raise UsageError for what the user can mend, OutputError for what else fails while `path` is tried."""
    try:
        with writing(path):
            yield
    except OutputError as error:
        cause = error.__cause__
        if isinstance(cause, PermissionError):
            hint = f"the directory {path.absolute().parent} must be writable"
        elif isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:
            hint = "choose a shorter name"
        else:
            raise
        raise UsageError(error.message, hint=hint) from error
