"""What is simulated: requests with lengths and arrivals, drawn from distributions or given. Read by the simulator.

A workload can be gone through any number of times and is the same each time, so that modes see the same requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from cbatch.errors import UsageError

DRAWN_AT_ONCE = 4096
MAX_SIGMA = 10
MAX_ARRIVAL_S = 1e10  # three centuries; far beyond, a clock of floats loses steps
_PART = re.compile(r"(?:(\d+)(?:-(\d+))?|lognormal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?))(?:\*(\d+(?:\.\d+)?))?")
LENGTHS_HINT = "512, 64-512 (uniform), lognormal:MEDIAN:SIGMA, or several with weights: 64-256*3,6000-7000*1"


class Work(NamedTuple):
    """One request."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    shared_tokens: int = 0  # of the prompt, at its start, the same in all requests

    @property
    def num_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.output_tokens


class Workload(Protocol):
    """Requests in the order in which they arrive."""

    def __iter__(self) -> Iterator[Work]: ...

    def __len__(self) -> int: ...

    @property
    def shares(self) -> bool:
        """Whether any two requests begin alike."""


class _Part(NamedTuple):
    """Uniform from `low` to `high`, or lognormal around the median `low`."""

    weight: float
    low: float
    high: float
    sigma: float | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, a mixture of parts; what it draws beyond `most` is `most`, and at least 1."""

    parts: tuple[_Part, ...]
    most: int

    @classmethod
    def parse(cls, text: str, most: int) -> Lengths:
        """Read '512', '64-512', 'lognormal:400:0.8', or several with weights. Raises UsageError."""
        if most < 1:
            raise UsageError(
                f"a context of {most + 1} tokens holds no prompt with a completion", hint="raise --max-model-len"
            )
        parts = tuple(_parse_part(word, text) for word in text.split(","))
        return cls(parts, most)

    @property
    def longest(self) -> float:
        """The most tokens that it draws, a lognormal part's tail aside."""
        return max(part.high for part in self.parts)

    def draw(self, generator: Generator, count: int) -> NDArray[np.int64]:
        weights = np.array([part.weight for part in self.parts])
        choice = generator.choice(len(self.parts), count, p=weights / weights.sum())
        drawn = np.empty(count)
        for index, part in enumerate(self.parts):
            if part.sigma is None:
                low, high = (int(min(end, self.most)) for end in (part.low, part.high))
                values = generator.integers(low, high + 1, count).astype(np.float64)
            else:
                values = np.rint(generator.lognormal(np.log(part.low), part.sigma, count))
            drawn = np.where(choice == index, values, drawn)
        return np.clip(drawn, 1, self.most).astype(np.int64)


def _parse_part(word: str, text: str) -> _Part:
    found = _PART.fullmatch(word.strip())
    if found is not None:
        low, high, median, sigma, weight = found.groups()
        part = _Part(
            float(weight or 1), float(low or median), float(high or low or median), float(sigma) if sigma else None
        )
        if 1 <= part.low <= part.high < math.inf and 0 < part.weight < math.inf and (part.sigma or 0) < MAX_SIGMA:
            return part
    raise UsageError(f"{text!r} is no distribution of lengths", hint=LENGTHS_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Requests drawn from distributions; the seed decides them all."""

    count: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int = 0  # tokens that all prompts begin with, part of their lengths
    rate: float | None = None  # requests a second, Poisson; None: all at once
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def shares(self) -> bool:
        return self.shared_prefix > 0

    def __iter__(self) -> Iterator[Work]:
        generator = np.random.default_rng(self.seed)
        arrived = 0.0
        for start in range(0, self.count, DRAWN_AT_ONCE):
            count = min(DRAWN_AT_ONCE, self.count - start)
            prompts = self.prompt_tokens.draw(generator, count).tolist()
            outputs = self.output_tokens.draw(generator, count).tolist()
            gaps = generator.exponential(1 / self.rate, count).tolist() if self.rate else [0.0] * count
            for prompt, output, gap in zip(prompts, outputs, gaps, strict=True):
                arrived += gap
                yield Work(prompt, output, arrived, min(prompt, self.shared_prefix))


@dataclass(frozen=True, slots=True)
class GivenWorkload:
    """Requests whose lengths are known."""

    works: Sequence[Work]

    def __len__(self) -> int:
        return len(self.works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self.works)

    @property
    def shares(self) -> bool:
        return any(work.shared_tokens for work in self.works)


def arriving(workload: Workload, rate: float, seed: int) -> GivenWorkload:
    """Give the same requests, arriving at random so many a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(workload))
    times = np.cumsum(gaps).tolist()
    return GivenWorkload([work._replace(arrival_s=at) for work, at in zip(workload, times, strict=True)])
