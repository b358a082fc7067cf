"""Moves requests out of the cache when it is full, and back in later: to host memory where it has room, else by a
soft reset, which keeps the tokens and computes their KV again.

The scheduler decides who moves and when; the model runner carries out the copies that a step's plan holds, grouped
in one transfer each way. Leaves out the host memory itself, which the runner owns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.request import Request, RequestStatus


@dataclass(slots=True)
class PageCopies:
    """Pages to copy between the cache and the host pool, pairwise; a page holds the keys and values of one layer."""

    cache_pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.host_pages)

    def clear(self) -> None:
        """Forget what has been copied, so that a step that is tried again does not copy it twice."""
        self.cache_pages.clear()
        self.host_pages.clear()


@dataclass(slots=True)
class Moves:
    """What one step moves. All that goes out does so before anything comes back into the room that it leaves."""

    out: PageCopies = field(default_factory=PageCopies)
    back: PageCopies = field(default_factory=PageCopies)
    num_offloads: int = 0  # requests
    num_restores: int = 0
    num_soft_resets: int = 0


class OffloadManager:
    """Knows which host pages hold whose blocks."""

    def __init__(self, cache: CacheManager, num_host_pages: int) -> None:
        self._cache = cache
        self._free = list(range(num_host_pages))
        self.num_host_pages = num_host_pages

    @property
    def num_free_host_pages(self) -> int:
        return len(self._free)

    def move_out(self, request: Request, moves: Moves) -> None:
        """Take all blocks of an active `request`, keeping their content in the host pool if it all fits there."""
        pages = self._cache.pages_in_use(request)
        if 0 < len(pages) <= len(self._free):
            request.host_pages = [self._free.pop() for _ in pages]
            moves.out.cache_pages += pages
            moves.out.host_pages += request.host_pages
            moves.num_offloads += 1
        else:
            request.num_computed_tokens = 0
            moves.num_soft_resets += 1
        self._cache.release(request)
        request.preemptions += 1
        request.status = RequestStatus.PENDING

    def move_back(self, request: Request, moves: Moves) -> None:
        """Fill the blocks of a `request` that was admitted again, but for those that it found in the cache."""
        num_shared = sum(map(len, request.tables))
        extended = self._cache.extend(request, request.num_computed_tokens)
        assert extended, "admitted without room"
        pages = self._cache.pages_in_use(request)
        assert len(pages) == len(request.host_pages)
        skipped = num_shared * self._cache.pages_per_block(0)
        moves.back.cache_pages += pages[skipped:]
        moves.back.host_pages += request.host_pages[skipped:]
        moves.num_restores += 1
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Give up the host pages of a `request`, if it has any."""
        self._free += request.host_pages
        request.host_pages = []
