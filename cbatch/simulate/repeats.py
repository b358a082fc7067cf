"""Takes many steps at once where nothing changes from one to the next but positions. Called by the simulator.

In a step that only decodes, and in which nobody came or left, the same requests decode again in the next one: until one
of them is done, until somebody arrives, or until the cache is full. Who waits cannot join before that, since the room
only gets less. So the requests are moved on by hand, with the real cache, and the times are those of single steps. Long
completions in small batches are simulated many times faster for it; a test holds the figures to those without it.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.policies import FifoScheduler, PrefillFirstScheduler
from cbatch.engine.request import Request
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.step import StepPlan
from cbatch.simulate.cost import CostModel

LEAST = 4  # steps that are worth it


class RepeatedStep(NamedTuple):
    """One of the steps that were taken at once."""

    began: float
    duration: float
    usage: float  # of the cache


class Repeater:
    """Repeats steps of one scheduler."""

    def __init__(
        self, scheduler: Scheduler, cache: CacheManager, cost: CostModel, *, shares: bool, read_size: int
    ) -> None:
        """`shares` says whether blocks of prompts are shared; contexts are read in multiples of `read_size` tokens."""
        self._scheduler = scheduler
        self._cache = cache
        self._cost = cost
        allocators = cache.allocators
        is_plain = len(allocators) == 1 and isinstance(allocators[0], FullAttentionCacheAllocator)
        is_known = isinstance(scheduler, FifoScheduler | PrefillFirstScheduler)  # whoever waits there needs room only
        self._can_repeat = is_plain
        self._can_repeat_while_some_wait = is_plain and is_known and not shares
        self._page_size, self._read_size = allocators[0].page_size, read_size
        self._num_layers = len(allocators[0].layers)

    def repeat(self, plan: StepPlan, kv_tokens: float, now: float, arrival: float, sampled: int) -> list[RepeatedStep]:
        """Take the steps that follow `plan`'s and are like it, and begin before the next `arrival` that can be let in.

        That step read `kv_tokens`. Every request gets the token `sampled` in each of them.
        """
        active = self._scheduler.active
        if not len(active) == len(plan.items) == plan.num_tokens == plan.num_decode_tokens or not active:
            return []
        if not (self._can_repeat_while_some_wait if self._scheduler.waiting else self._can_repeat):
            return []
        count = min(request.max_tokens - request.num_generated for request in active) - 1
        while count >= LEAST and not self._fits(active, count):
            count //= 2
        if count < LEAST:
            return []
        steps = self._steps(active, kv_tokens, now, count, arrival)
        self._move_on(active, [step.began + step.duration for step in steps], sampled)
        return steps

    def _fits(self, active: list[Request], count: int) -> bool:
        """Tell whether the cache holds, and a step may read, what all requests have after `count` more steps."""
        cache, limits = self._cache, self._scheduler.limits
        needed = [0] * len(cache.allocators)
        for request in active:
            missing = cache.num_missing_blocks(request, request.num_computed_tokens + count)
            needed = [n + m for n, m in zip(needed, missing, strict=True)]
        num_pages = sum(cache.num_pages_read(request, request.num_computed_tokens + count) for request in active)
        return cache.has_room(needed) and num_pages <= limits.max_pages_read

    def _steps(
        self, active: list[Request], kv_tokens: float, now: float, count: int, arrival: float
    ) -> list[RepeatedStep]:
        """Time the steps one by one: in each, those requests whose page is full begin another."""
        at_page = _count_places(active, self._page_size)
        at_read = _count_places(active, self._read_size)
        pool, num_requests = self._cache.pool, len(active)
        total = pool.num_usable * pool.pages_per_chunk
        num_owned = self._cache.allocators[0].num_owned_blocks * self._num_layers
        steps: list[RepeatedStep] = []
        for number in range(count):
            if now >= arrival:
                break
            num_owned += at_page[-number % self._page_size] * self._num_layers
            num_longer = at_read[-number % self._read_size]
            kv_tokens += num_longer * self._read_size
            if num_longer or not steps:
                duration = self._cost.step_s(num_requests, kv_tokens, num_requests, 0)
            steps.append(RepeatedStep(now, duration, num_owned / total))
            now += duration
        return steps

    def _move_on(self, active: list[Request], times: list[float], sampled: int) -> None:
        """Book what the steps that ended at `times` did."""
        count, ended = len(times), array("d", times)
        for request in active:
            before = request.num_computed_tokens
            extended = self._cache.extend(request, before + count)
            assert extended, "repeated without room"
            request.token_ids.extend([sampled] * count)
            request.token_times.extend(ended)
            request.num_computed_tokens = request.num_ever_computed = before + count
            request.computed_tokens += count
            self._cache.commit(request, before, before + count)


def _count_places(requests: list[Request], size: int) -> list[int]:
    """Count the requests by the number of tokens behind the last full `size` of them."""
    counts = [0] * size
    for request in requests:
        counts[request.num_computed_tokens % size] += 1
    return counts
