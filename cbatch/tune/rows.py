"""The rows of a search's input, read as `cbatch run` reads them: once to see what there is, again for the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from cbatch.config import EngineConfig
from cbatch.jobs.identity import identify_model
from cbatch.jobs.keys import job_identity
from cbatch.jobs.ledger import Ledger
from cbatch.jobs.opening import RowSetup, open_rows
from cbatch.jobs.reader import JobReader, JobRow
from cbatch.tune.calibrate import LEAST_ROWS, too_few
from cbatch.tune.profile import read_profile


class InputRows:
    """An input that was looked at from end to end."""

    def __init__(self, setup: RowSetup, engine: EngineConfig, tick: Callable[[], None]) -> None:
        """Read all of it; `tick` is called for every row. Raises InputError where too few rows can run."""
        self.job = setup.job
        self._setup = setup
        self._tick = tick
        self.model_identity = identify_model(engine)
        reader = self._reader()
        max_tokens = setup.job.sampling.get("max_tokens")
        self.profile = read_profile(reader, max_tokens if isinstance(max_tokens, int) else None, tick)
        self.digest = reader.digest
        if self.profile.num_good < LEAST_ROWS:
            error = self.profile.first_error
            raise too_few(self.profile.num_good, None if error is None else str(error))

    def fetch(self, picked: Iterable[int]) -> list[JobRow]:
        """Read the picked rows again, and return them in the order in which they were picked."""
        wanted = dict(zip(picked, count(), strict=False))
        found: dict[int, JobRow] = {}
        for row in self._reader():
            self._tick()
            if row.index in wanted:
                found[row.index] = row
                if len(found) == len(wanted):
                    break
        return [found[index] for index in wanted]

    def _reader(self) -> JobReader:
        job = self._setup.job
        opened = open_rows(self._setup, self._tick)
        identity = job_identity(self.model_identity, job.generation_config, job.seed)
        return JobReader(opened.rows, opened.interpret, Ledger(), identity)
