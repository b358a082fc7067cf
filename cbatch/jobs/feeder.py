"""The feeder: one thread that tokenises rows a bounded window ahead of the engine.

The step loop takes prompts from it and never waits: None stands for "nothing ready now".
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cbatch.engine.request import Prompt
from cbatch.errors import RowError, UsageError
from cbatch.jobs.keys import row_seed
from cbatch.jobs.params import resolve
from cbatch.jobs.prompts import NO_CHAT_TEMPLATE, TEMPLATE_HINT, PromptEncoder
from cbatch.jobs.reader import JobRow

MAX_AHEAD_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadyRow:
    """A row with its prompt, ready for the engine."""

    row: JobRow
    prompt: Prompt
    num_dropped: int  # prompt tokens cut off to fit the context


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
        encoder: PromptEncoder,
        defaults: dict[str, object],
        job_seed: int,
        *,
        max_ahead: int,
        fail: Callable[[JobRow, RowError], None],
        replay: Callable[[JobRow], None],
    ) -> None:
        """Start; rows that need no engine go to `fail` and `replay`."""
        self._rows = rows
        self._encoder = encoder
        self._defaults = defaults
        self._job_seed = job_seed
        self._fail = fail
        self._replay = replay
        self._has_encoded = False
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
            ready = self._encode(row)
        except RowError as error:
            self._fail(row, error)
            return True
        return self._window.put(ready)

    def _encode(self, row: JobRow) -> ReadyRow:
        if row.error is not None:
            raise row.error
        assert row.rendered is not None
        max_tokens = row.given.get("max_tokens", self._defaults.get("max_tokens"))
        assert max_tokens is None or isinstance(max_tokens, int)
        try:
            encoded = self._encoder.encode(row.rendered, max_tokens)
        except RowError as error:
            if error.code == NO_CHAT_TEMPLATE and not self._has_encoded:
                raise UsageError(
                    f"{row.row.location} holds messages, and the model has no chat template", hint=TEMPLATE_HINT
                ) from None
            raise RowError(error.code, f"{row.row.location}: {error.message}") from error
        self._has_encoded = True
        sampling = resolve(row.given, self._defaults, row_seed(self._job_seed, row.claim.key))
        return ReadyRow(row, Prompt(row.index, encoded.token_ids, sampling), encoded.num_dropped)
