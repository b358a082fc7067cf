"""The engine that is simulated: what of a real engine's plan decides over its schedule. Built from options, from a
run's trace or from a preset; read by the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cbatch.engine.cache.build import build_cache
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.modes import Mode
from cbatch.engine.policies import SCHEDULERS
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.step import StepLimits
from cbatch.errors import UsageError

HINT = "correct it where it is given: an option, a calibration or a trace"
MAX_BLOCKS = 1 << 24  # some gigabytes of bookkeeping
COUNTS = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_model_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """Settings under the names that the engine's own have. Raises UsageError for what no engine can have."""

    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    max_model_len: int
    scheduler_type: str = "fifo"
    safety_margin: float | None = None  # None: the scheduler's default
    allow_block_sharing: bool = True
    num_host_pages: int = 0
    layer_windows: tuple[int | None, ...] = (None,)  # one layer stands for all of a model without windows
    has_pages: bool = True  # else a page is all that a request ever gets, taken at once; only what is in it is read

    def __post_init__(self) -> None:
        for name in COUNTS:
            _check_count(name, getattr(self, name), least=1)
        if self.num_blocks > MAX_BLOCKS:
            raise UsageError(
                f"num_blocks is {self.num_blocks}; a simulation keeps track of {MAX_BLOCKS} at most",
                hint="lower --num-blocks, or take larger pages",
            )
        _check_count("num_host_pages", self.num_host_pages, least=0)
        for window in self.layer_windows:
            _check_count("layer_windows", window or 1, least=1)
        margin = self.safety_margin
        if margin is not None and (not isinstance(margin, int | float) or not 0 <= margin < 1):
            raise UsageError(f"safety_margin is {margin!r}; it must be at least 0 and below 1", hint=HINT)
        if self.scheduler_type not in SCHEDULERS:
            known_types = ", ".join(SCHEDULERS)
            raise UsageError(f"unknown scheduler_type '{self.scheduler_type}'", hint=f"known: {known_types}")

    def changed(self, values: Mapping[str, Any]) -> SimulatedEngine:
        """Give the engine with those of `values` that it has, None aside. Raises UsageError where it cannot be.

        Pages of another size leave the cache as many tokens as it had, unless its blocks are given as well; another
        scheduler has its own default margin.
        """
        known = {field.name for field in fields(self)}
        given = {k: v for k, v in values.items() if k in known and v is not None}
        if self.safety_margin == SCHEDULERS[self.scheduler_type].default_safety_margin:
            given.setdefault("safety_margin", None)
        page_size = given.get("page_size", self.page_size)
        _check_count("page_size", page_size, least=1)
        for name in ("num_blocks", "num_host_pages"):
            given.setdefault(name, getattr(self, name) * self.page_size // page_size)
        if given["num_blocks"] == 0 and values.get("num_blocks") is None:
            num_tokens = self.num_blocks * self.page_size
            raise UsageError(
                f"a page of {page_size} tokens is larger than the whole cache, of {num_tokens}",
                hint="lower --page-size, or give --num-blocks as well",
            )
        return replace(self, **given)

    def unpaged(self, reserved_tokens: int) -> SimulatedEngine:
        """Give the engine with a cache of as many bytes, of which every request reserves so many tokens as it joins.

        What does not fit into a reservation never runs. Raises UsageError where the cache holds no reservation.
        """
        num_tokens = self.num_blocks * self.page_size
        if reserved_tokens > num_tokens:
            raise UsageError(
                f"a cache of {num_tokens} tokens holds no request that reserves {reserved_tokens}",
                hint="lower --reserve, or raise --num-blocks",
            )
        return replace(
            self,
            page_size=reserved_tokens,
            num_blocks=num_tokens // reserved_tokens,
            max_model_len=min(self.max_model_len, reserved_tokens),
            allow_block_sharing=False,
            safety_margin=0.0,
            has_pages=False,
        )

    @property
    def read_size(self) -> int:
        """The tokens in whose multiples a request's context is read."""
        return self.page_size if self.has_pages else 1

    def build(self, mode: Mode) -> tuple[CacheManager, Scheduler]:
        """Build the real cache and the real scheduler of a mode, as `Engine` does."""
        cache = build_cache(
            self.layer_windows,
            num_blocks=self.num_blocks,
            page_size=self.page_size,
            max_batch_tokens=mode.largest_step(self.max_batch_tokens, self.max_model_len),
            max_model_len=self.max_model_len,
            allow_block_sharing=self.allow_block_sharing,
        )
        limits = StepLimits(
            self.max_batch_tokens,
            self.max_requests_per_batch,
            max_pages_read=cache.pool.num_usable * cache.pool.pages_per_chunk,
        )
        margin = SCHEDULERS[self.scheduler_type].default_safety_margin
        scheduler = mode.make_scheduler(
            self.scheduler_type,
            cache,
            limits,
            safety_margin=margin if self.safety_margin is None else self.safety_margin,
            num_host_pages=self.num_host_pages,
        )
        return cache, scheduler


def _check_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number, at least {least}", hint=HINT)
