"""The waiting requests of an offline job, grouped by the prefix that they share, longest first.

Called by the offline scheduler. Speaks as much of `collections.deque` as the scheduler uses of its queue; no torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from cbatch.engine.request import Request


class PrefixGroupQueue:
    """New requests group by group, the one with the longest request first; before them all that were sent back.

    A group is taken to its end, so that its prefix is in use or freshly cached throughout. Whoever comes is arranged
    with the rest once as many have come as are left, which makes a request's share of the sorting O(log n).
    """

    def __init__(
        self, block_hashes: Callable[[Request], Sequence[bytes]], expected_tokens: Callable[[Request], int]
    ) -> None:
        """`block_hashes` gives the chained hashes of a prompt's blocks, `expected_tokens` counts prompt and output."""
        self._block_hashes = block_hashes
        self._expected_tokens = expected_tokens
        self._sent_back: deque[Request] = deque()
        self._arranged: deque[Request] = deque()
        self._arrived: list[Request] = []

    def __len__(self) -> int:
        return len(self._sent_back) + len(self._arranged) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        yield from self._sent_back
        yield from self._arranged
        yield from self._arrived

    def __getitem__(self, index: int) -> Request:
        """Look at the first request; no other can be asked for."""
        assert index == 0
        return self._first_deque()[0]

    def append(self, request: Request) -> None:
        """Queue a new request."""
        self._arrived.append(request)

    def appendleft(self, request: Request) -> None:
        """Put a request that was out already before all others."""
        self._sent_back.appendleft(request)

    def extendleft(self, requests: Iterable[Request]) -> None:
        """Put requests back, the last one first."""
        self._sent_back.extendleft(requests)

    def popleft(self) -> Request:
        """Take the first request."""
        return self._first_deque().popleft()

    def clear(self) -> None:
        """Forget all requests."""
        self._sent_back.clear()
        self._arranged.clear()
        self._arrived.clear()

    def _first_deque(self) -> deque[Request]:
        if self._sent_back:
            return self._sent_back
        if len(self._arrived) > len(self._arranged):
            self._arranged = deque(self._arrange([*self._arranged, *self._arrived]))
            self._arrived.clear()
        return self._arranged

    def _arrange(self, requests: Sequence[Request]) -> list[Request]:
        """Order requests: groups by their longest member, members by length, equals as they came."""
        holders = Counter(digest for request in requests for digest in self._block_hashes(request))
        groups: dict[bytes | Request, list[Request]] = {}
        for request in requests:
            shared = [digest for digest in self._block_hashes(request) if holders[digest] > 1]
            groups.setdefault(shared[-1] if shared else request, []).append(request)
        for group in groups.values():
            group.sort(key=self._expected_tokens, reverse=True)
        ranked = sorted(groups.values(), key=lambda group: self._expected_tokens(group[0]), reverse=True)
        return [request for group in ranked for request in group]
