"""The scheduler that uses what only an offline engine knows: the rows ahead, and that nobody waits for any one of them.

Chosen by `scheduler_type = "offline"`. Groups rows by prefix, longest first, and admits a request only where the cache
has room for what all are expected to grow to, so that preemption is an exception. Results are the same as with any
other scheduler; only the order in which requests run differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.prefix_groups import PrefixGroupQueue
from cbatch.engine.request import Request
from cbatch.engine.scheduler import Scheduler
from cbatch.engine.speculation import Results
from cbatch.engine.step import FinishedRequest, StepLimits, StepPlan

CONFIDENT_AFTER = 16  # finished requests, before their lengths tell anything of the next
MARGIN = 1.25  # over their mean


class OfflineScheduler(Scheduler):
    """Active decodes, then active prefills, then waiting requests by prefix group, longest first."""

    default_safety_margin = 0.0  # admission reserves what is expected instead
    waiting_batches = 16

    def __init__(
        self, cache: CacheManager, limits: StepLimits, *, safety_margin: float = 0.0, num_host_pages: int = 0
    ) -> None:
        super().__init__(cache, limits, safety_margin=safety_margin, num_host_pages=num_host_pages)
        self.waiting = PrefixGroupQueue(self.cache.hash_blocks, self.expected_tokens)
        self._num_ended = 0  # requests that could end by themselves and did, or reached their limit
        self._tokens_ended = 0  # that they generated

    def expected_tokens(self, request: Request) -> int:
        """Count the tokens that a request will have in the cache: to its limit where nothing else is known."""
        most = request.num_prompt_tokens + request.max_tokens - 1  # the last one has no KV
        if request.prompt.sampling.ignore_eos or self._num_ended < CONFIDENT_AFTER:
            return most
        expected = int(MARGIN * self._tokens_ended / self._num_ended)
        return min(most, max(request.num_tokens, request.num_prompt_tokens + expected))

    def update(self, plan: StepPlan, results: Sequence[Results], now: float) -> list[FinishedRequest]:
        finished = super().update(plan, results, now)
        for request in (f.request for f in finished):
            if not request.prompt.sampling.ignore_eos:
                self._num_ended += 1
                self._tokens_ended += request.num_generated
        return finished
