"""The runs, in turns: everybody once, then everybody in the opposite order, so that a machine that drifts favours none.

Called by the command. Leaves out how the figures look (`cli`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cbatch.bench.contestants import Contestant
from cbatch.bench.figures import Figures, measure, medians
from cbatch.bench.process import RunFailedError, check_tokens, run_process
from cbatch.bench.workload import Workload
from cbatch.config import EngineConfig
from cbatch.jobs.totals import Targets

OnRun = Callable[["Result", int], None]


@dataclass(slots=True)
class Result:
    """One contestant's runs; after a failure it takes no further part."""

    contestant: Contestant
    runs: list[Figures] = field(default_factory=list)
    error: str | None = None
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    cached_tokens: int | None = None  # of the prompts, found in the cache; None where nobody says

    @property
    def median(self) -> Figures | None:
        return medians(self.runs) if self.runs and self.error is None else None

    def as_dict(self) -> dict[str, Any]:
        median = self.median
        return {
            "error": self.error,
            "median": None if median is None else median.as_dict(),
            "runs": [run.as_dict() for run in self.runs],
            "cached_tokens": self.cached_tokens,
            "version": self.version,
            "settings": self.settings,
        }


def enter(contestants: Sequence[Contestant]) -> list[Result]:
    """Give everybody a result that is empty yet, or says why there will be none."""
    return [Result(contestant, error=contestant.missing) for contestant in contestants]


@dataclass(frozen=True, slots=True)
class Contest:
    """What everybody runs."""

    workload: Workload
    engine: EngineConfig
    dtype: str
    device: str
    num_threads: int
    targets: Targets
    verbose: bool = False

    def task(self) -> dict[str, Any]:
        """Spell the task, as `peer_driver` describes it."""
        return {
            "model": self.engine.model,
            "dtype": self.dtype,
            "device": self.device,
            "revision": self.engine.revision,
            "trust_remote_code": self.engine.trust_remote_code,
            "max_requests": self.engine.max_requests_per_batch,
            "max_batch_tokens": self.engine.max_batch_tokens,
            "longest": self.workload.longest,
            "rows": self.workload.rows,
            "engine": asdict(self.engine),
        }

    def run(self, results: Sequence[Result], repeats: int, on_run: OnRun) -> None:
        """Run everybody `repeats` times, in place; `on_run` is told of each run when it is over."""
        for repeat in range(repeats):
            for result in results if repeat % 2 == 0 else reversed(results):
                if result.error is None:
                    self._run_once(result)
                    on_run(result, repeat)

    def _run_once(self, result: Result) -> None:
        try:
            threads = {"OMP_NUM_THREADS": str(self.num_threads)}  # the peers' own choices differ
            outcome = run_process(result.contestant, self.task(), threads, verbose=self.verbose)
            check_tokens(outcome["token_times"], self.workload.rows)
        except RunFailedError as error:
            result.error = str(error)
            return
        result.runs.append(
            measure(
                outcome["token_times"],
                self.targets,
                load_s=outcome["load_s"],
                peak_rss_bytes=outcome["peak_rss_bytes"],
                peak_device_bytes=outcome["peak_device_bytes"],
            )
        )
        result.version, result.settings = outcome["version"], outcome["settings"]
        result.cached_tokens = outcome.get("cached_tokens")
