"""The lock beside an output: one run at a time, and a line that says who holds it. Called at the start of a job.

The kernel's lock (flock) frees itself when its process dies. Where another host may hold it and the file system does
not carry flock between hosts, the heartbeat decides: the file's time, which the holder renews.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cbatch.errors import OutputError, UsageError
from cbatch.io.atomic import writing

HEARTBEAT_S = 10.0
STALE_S = 90.0  # without a heartbeat for so long, a holder on another host is dead
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class JobLock:
    """Holds `path` while the `with` block runs. Raises UsageError where another run holds it."""

    def __init__(self, path: Path, *, force: bool = False, lost: Callable[[], None] | None = None) -> None:
        """`force` takes the lock from whoever holds it; `lost` is called where another run took it from this one."""
        self._path = path
        self._force = force
        self._lost = lost
        self._file = -1
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="cbatch-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        with writing(self._path):
            if self._force:
                self._path.unlink(missing_ok=True)
            while not self._acquire():
                pass
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(_describe_self()).encode() + b"\n", 0)
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._heart.join()
        if self._is_ours():
            self._path.unlink()
        os.close(self._file)

    def check(self) -> None:
        """Raise OutputError where the lock is lost: another run has taken it, or it was removed."""
        if not self._is_ours():
            what = "another run has taken" if self._path.exists() else "somebody removed"
            raise OutputError(f"{what} the lock {self._path}", hint="only one run may go on: this one stops here")

    def _acquire(self) -> bool:
        """Try once; False where the file vanished meanwhile."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            holder = self._read()
            if not self._take_kernel_lock(holder):
                raise self._refuse(holder)
            if holder and holder.get("host") != socket.gethostname() and self._age() < STALE_S:
                raise self._refuse(holder)
            if self._is_ours():
                return True
        except BaseException:
            os.close(self._file)
            raise
        os.close(self._file)
        return False

    def _take_kernel_lock(self, holder: dict[str, Any]) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return holder.get("host") != socket.gethostname() or not _is_alive(holder)
        return True

    def _read(self) -> dict[str, Any]:
        """What the holder wrote; nothing where it is new, or its holder died before writing."""
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(os.pread(self._file, 4096, 0))
            if isinstance(value, dict):
                return value
        return {}

    def _age(self) -> float:
        """Seconds since the last heartbeat, by the file system's own clock."""
        before = os.fstat(self._file)
        probe = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - before.st_mtime

    def _refuse(self, holder: dict[str, Any]) -> UsageError:
        who = (
            f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('started_at', '?')}, "
            f"last heartbeat {max(0.0, self._age()):.0f} s ago"
        )
        return UsageError(
            f"another run holds {self._path}: {who}", hint="wait for it, or pass --force-unlock if it is dead"
        )

    def _is_ours(self) -> bool:
        """Whether the path still names the file that this process holds."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except OSError:
            return False

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            if not self._is_ours():
                if self._lost is not None:
                    self._lost()
                return
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _describe_self() -> dict[str, Any]:
    import psutil

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "started_at": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote the lock still runs: its number may have gone to another one."""
    import psutil

    try:
        return bool(psutil.Process(holder["pid"]).create_time() == holder["process_started"])
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
