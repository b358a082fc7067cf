"""The step loop of a job: prompts from the feeder into the engine, finished requests to the writer. On the main thread.

Every step also looks for what ends a job early: a failing thread, too many failed rows, a request to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from cbatch.config import SamplingParams
from cbatch.engine.observer import Observer
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.stats import EngineStats
from cbatch.errors import CbatchError, InputError
from cbatch.jobs.encoding import ReadyRow
from cbatch.jobs.feeder import Feeder
from cbatch.jobs.progress import Progress, Snapshot
from cbatch.jobs.prompts import Tokenizer
from cbatch.jobs.results import Session, finished_entry
from cbatch.jobs.stop import Interrupted, Stop
from cbatch.jobs.writer import Writer


class Plan(Protocol):
    """What a job needs of the engine's plan."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_requests_per_batch(self) -> int: ...

    @property
    def mode(self) -> str: ...

    @property
    def num_host_pages(self) -> int: ...

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The attention window of every layer in tokens; None for the whole context."""

    def settings(self) -> dict[str, dict[str, object]]:
        """Return name → value and reason."""


class BatchEngine(Protocol):
    """What a job needs of an engine."""

    @property
    def plan(self) -> Plan: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation_defaults(self) -> dict[str, object]: ...

    @property
    def load_s(self) -> float: ...

    @property
    def stats(self) -> EngineStats: ...

    def steps(self, prompts: Iterator[Prompt | None]) -> Iterator[list[RequestOutput]]:
        """Give one list of finished requests per step; None among the prompts means nothing is ready now."""

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every step from now on."""

    def prepare(self, params: SamplingParams) -> None:
        """Make ready what prompts with such parameters need beside the model."""

    def drop_waiting(self) -> list[int]:
        """Forget the requests that never started and return their ids."""


class TooManyErrorsError(CbatchError):
    """More rows failed than the user lets pass."""


def check_errors(writer: Writer, max_errors: int | None) -> None:
    """Raise TooManyErrorsError where as many rows failed as end the job."""
    num_errors = writer.tally.num_errors
    if max_errors is not None and num_errors >= max_errors:
        raise TooManyErrorsError(
            f"stopped after {num_errors} failed rows (--max-errors {max_errors})",
            hint="the journal says why; the finished rows are kept, and --retry-errors runs the failed ones again",
        )


class StepLoop:
    """Runs an engine until its rows are finished, or a stop was asked for and the grace is over."""

    def __init__(
        self,
        engine: BatchEngine,
        feeder: Feeder,
        writer: Writer,
        session: Session,
        *,
        stop: Stop,
        progress: Progress,
        grace_s: float,
        max_errors: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._feeder = feeder
        self._writer = writer
        self._session = session
        self._stop = stop
        self._progress = progress
        self._grace_s = grace_s
        self._max_errors = max_errors
        self._clock = clock
        self._pending: dict[int, ReadyRow] = {}  # handed to the engine, not finished
        self._deadline: float | None = None  # of the drain, once there is one
        self.output_wait_s = 0.0  # that finished rows took to hand over, the writer being behind

    def run(self) -> None:
        """Finish every row. Raises Interrupted after a drain, and what made the feeder or the writer fail."""
        for outputs in self._engine.steps(self._prompts()):
            for output in outputs:
                self._finish(output)
            self._progress.update(self._snapshot)
            self._check()
            if self._deadline is not None and self._clock() >= self._deadline:
                break
        if self._deadline is not None:
            raise Interrupted(self._stop.reason)
        if self._feeder.failure is not None:
            raise self._feeder.failure
        assert not self._pending, "the engine lost requests"

    def _prompts(self) -> Iterator[Prompt | None]:
        while self._deadline is None:
            ended = self._feeder.ended  # before the look, so that nothing comes after an empty one
            ready = self._feeder.take()
            if ready is not None:
                self._pending[ready.prompt.request_id] = ready
                yield ready.prompt
            elif ended:
                return
            else:
                yield None

    def _finish(self, output: RequestOutput) -> None:
        ready = self._pending.pop(output.request_id)
        make_entry = partial(
            finished_entry,
            ready.row,
            output,
            self._engine.tokenizer,
            self._session,
            num_dropped=ready.num_dropped,
            generate_s=self._engine.stats.generate_s,
        )
        began = self._clock()
        self._writer.write(ready.row.index, make_entry)
        self.output_wait_s += self._clock() - began

    def _check(self) -> None:
        self._writer.check()
        check_errors(self._writer, self._max_errors)
        failure = self._feeder.failure
        if failure is not None and not isinstance(failure, InputError):  # what was read before is finished first
            raise failure
        if self._stop.requested and self._deadline is None:
            self._deadline = self._clock() + self._grace_s
            for request_id in self._engine.drop_waiting():
                del self._pending[request_id]
            self._progress.say(
                f"{self._stop.reason}: finishing {len(self._pending)} running rows, for up to {self._grace_s:g} s"
            )

    def _snapshot(self) -> Snapshot:
        tally, stats = self._writer.tally, self._engine.stats
        return Snapshot(
            rows_done=tally.num_rows,
            rows_replayed=tally.num_replayed,
            rows_error=tally.num_errors,
            output_tokens=stats.output_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            cache_usage=stats.cache_usage,
        )
