"""The feeder: one thread that tokenises rows a bounded window ahead of the engine.

The step loop takes prompts from it and never waits: None stands for "nothing ready now".
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from cbatch.errors import RowError
from cbatch.jobs.encoding import ReadyRow, RowEncoder
from cbatch.jobs.reader import JobRow

MAX_AHEAD_TOKENS = 1 << 20


class Window:
    """A bounded queue from the feeder to the step loop."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows: deque[ReadyRow] = deque()
        self._num_tokens = 0
        self._changed = threading.Condition()
        self._open = True

    def put(self, ready: ReadyRow) -> bool:
        """Add a row once there is room; False where nobody takes rows any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._has_room())
            if self._open:
                self._rows.append(ready)
                self._num_tokens += len(ready.prompt.token_ids)
            return self._open

    def take(self) -> ReadyRow | None:
        """Return the next row, None where none is ready."""
        with self._changed:
            if not self._rows:
                return None
            ready = self._rows.popleft()
            self._num_tokens -= len(ready.prompt.token_ids)
            self._changed.notify()
            return ready

    def close(self) -> None:
        """Take no more rows; those inside are forgotten."""
        with self._changed:
            self._open = False
            self._rows.clear()
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._rows) < self._max_rows and (not self._rows or self._num_tokens < MAX_AHEAD_TOKENS)


class Feeder:
    """Tokenises rows on a thread of its own; whatever fails there is kept in `failure` and ends it."""

    def __init__(
        self,
        rows: Iterator[JobRow],
        encoder: RowEncoder,
        *,
        max_ahead: int,
        fail: Callable[[JobRow, RowError], None],
        replay: Callable[[JobRow], None],
    ) -> None:
        """Start; rows that need no engine go to `fail` and `replay`."""
        self._rows = rows
        self._encoder = encoder
        self._fail = fail
        self._replay = replay
        self._window = Window(max_ahead)
        self._thread = threading.Thread(target=self._run, name="cbatch-feeder", daemon=True)
        self.failure: BaseException | None = None
        self._thread.start()

    def take(self) -> ReadyRow | None:
        """Return the next row, None where none is ready now."""
        return self._window.take()

    @property
    def ended(self) -> bool:
        """Whether all that will ever come can be taken now."""
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Read no further; False where the thread hangs in a read beyond `timeout_s`."""
        self._window.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for row in self._rows:
                if not self._feed(row):
                    return
        except BaseException as error:
            self.failure = error

    def _feed(self, row: JobRow) -> bool:
        """Pass one row on; False where it is not wanted any more."""
        if row.claim.offset is not None:
            self._replay(row)
            return True
        try:
            ready = self._encoder.encode(row)
        except RowError as error:
            self._fail(row, error)
            return True
        return self._window.put(ready)
