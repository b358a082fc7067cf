"""How a running job looks: a bar on a terminal, a plain line per interval in a log, nothing when quiet. On stderr.

Rates and times are of this process: rows that an earlier one finished are where the bar starts, not work done at once.
Leaves out the summary at the end, which is the command line's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

LOG_INTERVAL_S = 30.0
BAR_INTERVAL_S = 0.2
RATE_WINDOW_S = 20.0  # the rate shown is over about so long
DEFAULT_WIDTH = 100
DEFAULT_HEIGHT = 20
LOGGERS = ("cbatch", "cbatch_kernels")
_BLOCKS = "█▏"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a job at one moment."""

    rows_done: int
    rows_replayed: int  # of rows_done, finished before this process began
    rows_error: int
    output_tokens: int  # of this process
    num_running: int
    num_waiting: int
    cache_usage: float  # 0 to 1


class Progress:
    """Draws a job's progress on `stream`; a stream that fails is written to no more."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        count_rows: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count_rows` gives how many rows there will be, once that is known."""
        self._stream = None if quiet else stream or sys.stderr
        self._count_rows = count_rows
        self._clock = clock
        self._bar: Any = None
        self._is_terminal = self._stream is not None and is_terminal(self._stream)
        self._drawn_at = clock()
        self._began: tuple[float, Snapshot] | None = None
        self._earlier: tuple[float, int] | None = None  # a moment within the rate's window, and the tokens then
        self._tokens_per_s = 0.0

    def say(self, message: str) -> None:
        """Print one line, above the bar where there is one."""
        if self._stream is None:
            return
        with self._tolerating():
            if self._bar is not None:
                self._bar.clear()
            self._stream.write(f"cbatch: {_encodable(message, self._stream)}\n")
            self._stream.flush()
            if self._bar is not None:
                self._bar.refresh()

    def update(self, snapshot: Callable[[], Snapshot]) -> None:
        """Draw, where it is time to; `snapshot` is called only then."""
        now = self._clock()
        interval = BAR_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        if self._stream is None or (now - self._drawn_at < interval and self._began is not None):
            return
        taken = snapshot()
        self._measure(now, taken)
        if self._began is None:
            self._began = now, taken
            if not self._is_terminal:
                self._drawn_at = now
                return
        self._drawn_at = now
        with self._tolerating():
            if self._is_terminal:
                self._draw_bar(taken)
            else:
                self.say(self._line(now, taken))

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            with self._tolerating():
                self._bar.close()
            self._bar = None

    def _measure(self, now: float, taken: Snapshot) -> None:
        at, tokens = self._earlier or (now, taken.output_tokens)
        if now > at:
            self._tokens_per_s = (taken.output_tokens - tokens) / (now - at)
        if self._earlier is None or now - at >= RATE_WINDOW_S:
            self._earlier = now, taken.output_tokens

    def _line(self, now: float, taken: Snapshot) -> str:
        total = self._count_rows()
        if total is not None and total < taken.rows_done:  # the input has grown since it was counted
            total = None
        share = f" ({taken.rows_done / total:.0%})" if total else ""
        errors = f", {taken.rows_error} failed" if taken.rows_error else ""
        return (
            f"{taken.rows_done}/{'?' if total is None else total} rows{share}{errors}, {self._state(taken)}, "
            f"{self._eta(now, taken, total)} left"
        )

    def _state(self, taken: Snapshot) -> str:
        return (
            f"{self._tokens_per_s:.0f} tokens/s, {taken.num_running} running, {taken.num_waiting} waiting, "
            f"cache {taken.cache_usage:.0%}"
        )

    def _eta(self, now: float, taken: Snapshot, total: int | None) -> str:
        """The time left at the rate of this process's own rows."""
        assert self._began is not None
        began, first = self._began
        rows = (taken.rows_done - taken.rows_replayed) - (first.rows_done - first.rows_replayed)
        if total is None or rows <= 0:
            return "?"
        seconds = int((total - taken.rows_done) * (now - began) / rows)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def _draw_bar(self, taken: Snapshot) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                file=self._stream,
                unit="row",
                ncols=_width(self._stream),
                nrows=DEFAULT_HEIGHT,
                ascii=not _can_encode(_BLOCKS, self._stream),
                initial=taken.rows_replayed,
                mininterval=0,
            )
        self._bar.ncols = _width(self._stream)
        self._bar.total = self._count_rows()
        self._bar.initial = taken.rows_replayed
        self._bar.n = taken.rows_done
        errors = f", {taken.rows_error} failed" if taken.rows_error else ""
        self._bar.set_postfix_str(self._state(taken) + errors, refresh=True)

    @contextlib.contextmanager
    def _tolerating(self) -> Any:
        """Nobody may be there to look: that ends the drawing, not the job."""
        try:
            yield
        except (OSError, ValueError):
            self._stream = None


class _SayingHandler(logging.Handler):
    """Hands what is logged to a function that says it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


@contextlib.contextmanager
def saying_warnings(say: Callable[[str], None]) -> Iterator[None]:
    """Have the warnings of all of cbatch said by `say`, which knows of bars and of quiet, and by nobody else."""
    loggers, handler = [logging.getLogger(name) for name in LOGGERS], _SayingHandler(say)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def is_terminal(stream: TextIO) -> bool:
    """Whether a bar can be drawn and drawn over on this stream."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _width(stream: TextIO | None) -> int:
    """The terminal's columns; some say that they have none."""
    try:
        return (stream is not None and os.get_terminal_size(stream.fileno()).columns) or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH


def _can_encode(text: str, stream: TextIO | None) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _encodable(text: str, stream: TextIO) -> str:
    """The text in one line, in characters that the stream has."""
    line = " ".join(text.split())
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)
