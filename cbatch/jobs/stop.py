"""Stopping in order: signals, the end of a Slurm job, and how each phase of a job hears of them.

The first signal asks for a stop: the step loop drains, the other phases end at once. The second aborts the drain, the
third ends the process on the spot. Should the main thread hang in a long call (loading weights, one huge step), a
watcher ends the process once its time is over: every finished row is in the journal by then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
EXIT_MARGIN_S = 5.0  # for flushing after the drain
END_TIME_VARIABLE = "SLURM_JOB_END_TIME"
RESUME_HINT = "run the same command again to resume"


class Interrupted(BaseException):
    """The job was asked to stop, and stops here."""


class Stop:
    """Whether a job was asked to stop, and why. Written by signal handlers and the watcher, read by every phase."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._num_requests = 0
        self._interruptible = False

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop. Raises Interrupted in a phase that can end anywhere, and always from the second time on."""
        self._num_requests += 1
        self.reason = self.reason or reason
        if self._interruptible or self._num_requests > 1:
            raise Interrupted(self.reason)

    def check(self) -> None:
        """Raise Interrupted where a stop was asked for."""
        if self.reason is not None:
            raise Interrupted(self.reason)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark a phase that holds nothing to save: a request ends it at once, even in the middle of a read."""
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False


@contextmanager
def handling_signals(stop: Stop, *, grace_s: float, exit_code: int) -> Iterator[None]:
    """Turn signals into requests to stop. Does nothing outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 2:
            os._exit(exit_code)
        stop.request(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]  # nohup, a shell's background job
    try:
        for number in handled:  # before the watcher, which may send one at once
            signal.signal(number, handle)
        with _watching(stop, grace_s, exit_code):
            yield
    finally:
        for number in handled:
            signal.signal(number, before[number] or signal.SIG_DFL)


def ignore_signals() -> None:
    """Let nothing that still comes change how a process ends that has said how it does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _watching(stop: Stop, grace_s: float, exit_code: int) -> Iterator[None]:
    """Run the watcher. Signals reach it through a socket, even while the main thread runs no Python code."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(theirs, stop, grace_s, exit_code), name="cbatch-signals", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        watcher.join()
        theirs.close()


def _watch(signals: socket.socket, stop: Stop, grace_s: float, exit_code: int) -> None:
    """Ask for a stop before the Slurm job ends; after any request, end the process where it does not end in time."""
    deadline = _slurm_deadline(grace_s)
    patience = [
        grace_s + EXIT_MARGIN_S,
        EXIT_MARGIN_S,
        0.0,
    ]  # seconds left after the first, second and third signal
    received: list[str] = []
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([signals], [], [], timeout)
        if ready:
            number = signals.recv(1)
            if not number:
                return
            if number[0] in SIGNALS and patience:
                received.append(signal.Signals(number[0]).name)
                deadline = time.monotonic() + patience.pop(0)
        elif received:
            with contextlib.suppress(OSError):
                os.write(2, f"cbatch: stopped by {stop.reason or received[0]}; {RESUME_HINT}\n".encode())
            os._exit(exit_code)
        else:
            stop.reason = f"the end of the Slurm job ({END_TIME_VARIABLE})"
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = None


def _slurm_deadline(grace_s: float) -> float | None:
    """The moment at which a drain must begin, in monotonic seconds: the machine's clock may be set meanwhile.

    None where there is no end, or none that a process could wait for.
    """
    end = os.environ.get(END_TIME_VARIABLE, "")
    left = float(end) - time.time() - grace_s - EXIT_MARGIN_S if end.isdigit() else threading.TIMEOUT_MAX
    return time.monotonic() + left if left < threading.TIMEOUT_MAX else None
