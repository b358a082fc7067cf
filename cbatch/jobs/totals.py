"""What the columns of an output add up to. Filled while the output is put together, so that every figure of the report
can be computed again from the output; 16 bytes a row are kept for exact percentiles.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.jobs.journal import Entry

if TYPE_CHECKING:
    import numpy as np

LATENCIES = ("queue_s", "ttft_s", "itl_mean_s", "e2e_s")
PERCENTILES = (50, 90, 99)
MAX_ERROR_CODES = 100
BINS_PER_DECADE = 10  # of a histogram: bin i holds the seconds from 10 ** (i / 10) on
FIRST_BIN = -60  # and all that is less than a microsecond


def count_error(errors: Counter[str], code: str) -> None:
    """Count one more error, in place; codes beyond a number of different ones are all "other"."""
    errors[code if code in errors or len(errors) < MAX_ERROR_CODES else "other"] += 1


@dataclass(frozen=True, slots=True)
class Targets:
    """The latencies, in seconds, that a row must keep to count as good; None asks for nothing."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def are_met(self, result: dict[str, Any]) -> bool:
        """Whether a finished row kept them; a row of one token has no time between tokens."""
        pairs = ((self.ttft_s, result.get("ttft_s")), (self.itl_s, result.get("itl_mean_s")))
        return all(target is None or value is None or value <= target for target, value in pairs)


@dataclass(slots=True)
class Totals:
    """Sums over the entries added so far."""

    max_rows: int
    targets: Targets = Targets()
    rows_ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by code
    first_error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    good_tokens: int = 0  # of the rows that kept the targets
    computed_tokens: int = 0
    rows_truncated: int = 0
    truncated_tokens: int = 0
    rows_nulled: int = 0  # with null in the place of numbers of the input that JSON lacks
    columns_not_found: set[str] = field(default_factory=set)  # that no row has; filled with those looked for
    generate_s: dict[int, float] = field(default_factory=dict)  # by session: until its last row here
    output_tokens_of: Counter[int] = field(default_factory=Counter)  # by session
    _latencies: dict[str, array[float]] = field(init=False)  # room for every row at once: growing would copy
    _counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._latencies = {name: array("f", [0.0]) * self.max_rows for name in LATENCIES}
        self._counts = dict.fromkeys(LATENCIES, 0)

    @property
    def rows_error(self) -> int:
        return self.errors.total()

    @property
    def rows(self) -> int:
        return self.rows_ok + self.rows_error

    def add(self, entry: Entry) -> None:
        """Count one row of the output."""
        head, result = entry.head, entry.result
        self.columns_not_found -= entry.columns.keys()
        error = result.get("error")
        if error is None:
            self.rows_ok += 1
        else:
            count_error(self.errors, error["code"])
            self.first_error = self.first_error or error["message"]
        num_tokens = result.get("completion_tokens") or 0
        self.prompt_tokens += result.get("prompt_tokens") or 0
        self.cached_tokens += result.get("cached_tokens") or 0
        self.recomputed_tokens += result.get("recomputed_tokens") or 0
        self.preemptions += result.get("preemptions") or 0
        self.output_tokens += num_tokens
        self.good_tokens += num_tokens if error is None and self.targets.are_met(result) else 0
        self.computed_tokens += head.computed_tokens
        self.rows_truncated += head.num_dropped > 0
        self.truncated_tokens += head.num_dropped
        self.rows_nulled += head.has_nulled
        self.generate_s[head.session] = max(self.generate_s.get(head.session, 0.0), head.generate_s)
        self.output_tokens_of[head.session] += num_tokens
        if error is None:
            for name, values in self._latencies.items():
                if (value := result.get(name)) is not None:
                    values[self._counts[name]] = value
                    self._counts[name] += 1

    def percentiles(self) -> dict[str, dict[str, Any]]:
        """Return count, mean, percentiles and histogram of every latency, over the rows that did not fail."""
        import numpy as np

        table: dict[str, dict[str, Any]] = {}
        for name, values in self._latencies.items():
            count = self._counts[name]
            table[name] = {"count": count}
            if count:
                numbers = np.frombuffer(values, dtype=np.float32)[:count]
                numbers.sort()  # in place: what follows takes no copy worth mentioning
                histogram = _histogram(numbers)
                found = np.percentile(numbers, PERCENTILES, overwrite_input=True)  # which unsorts them
                table[name] |= {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}
                table[name] |= {"mean": float(numbers.mean(dtype=np.float64)), "max": float(numbers.max())}
                table[name]["histogram"] = histogram
        return table


def _histogram(numbers: np.ndarray) -> dict[str, Any]:
    """Count sorted seconds by bins that are the same in every report, so that reports add up."""
    import numpy as np

    last = max(FIRST_BIN, int(np.floor(np.log10(max(float(numbers[-1]), 1e-9)) * BINS_PER_DECADE)))
    edges = 10.0 ** (np.arange(FIRST_BIN + 1, last + 1) / BINS_PER_DECADE)
    below = np.concatenate(([0], np.searchsorted(numbers, edges), [len(numbers)]))
    counts = np.diff(below)
    (filled,) = np.nonzero(counts)
    return {"first_bin": FIRST_BIN + int(filled[0]), "counts": counts[filled[0] :].tolist()}
