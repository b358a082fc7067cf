"""All of a request's cache at once: every allocator grows it or none does, and prefixes are shared where all can.

The scheduler is the only caller. Tables and hashes live on the request; what is free lives in pool and allocators.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from cbatch.engine.cache.allocator import BlockTable, CacheAllocator, make_table
from cbatch.engine.cache.full import FullAttentionCacheAllocator
from cbatch.engine.cache.pool import CachePool
from cbatch.engine.cache.prefix import extend_block_hashes
from cbatch.engine.request import Request
from cbatch.units import ceil_div

BlockCounts = list[int]  # one count per allocator


class Admission(Enum):
    JOINED = "joined"
    NO_ROOM = "no room"
    AWAITS_PREFIX = "awaits prefix"  # its next block is being computed by another request


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """How full the cache is, in whole-model blocks: of a hybrid model's types each may hold fractions of one."""

    owned_blocks: float  # in the tables of requests
    cached_blocks: float  # owned by nobody, kept for a later match
    free_blocks: float
    usage: float  # share of the cache that requests own, 0 to 1
    waste: float | None  # share of the owned slots that hold no token; None while nothing is owned


class CacheManager:
    """Allocates, shares and frees the blocks of requests, over all attention types of a model."""

    def __init__(self, pool: CachePool, allocators: list[CacheAllocator], *, allow_block_sharing: bool) -> None:
        self.pool = pool
        self.allocators = allocators
        self._sharing: FullAttentionCacheAllocator | None = None
        if allow_block_sharing and len(allocators) == 1 and isinstance(allocators[0], FullAttentionCacheAllocator):
            self._sharing = allocators[0]
        self._page_readers = [(allocator.num_blocks_read, len(allocator.layers)) for allocator in allocators]
        self._in_flight: dict[bytes, Request] = {}  # hash of a block being computed → who computes it
        self.max_tokens_ever = _max_tokens_alone(pool, allocators)  # of the longest request that fits, alone

    def make_tables(self) -> list[BlockTable]:
        """Make the block tables of a request that owns nothing yet."""
        return [make_table() for _ in self.allocators]

    # Room

    def num_missing_blocks(self, request: Request, num_tokens: int) -> BlockCounts:
        """Count per allocator the blocks that `request` lacks to hold `num_tokens` tokens."""
        return [a.num_missing_blocks(t, num_tokens) for a, t in zip(self.allocators, request.tables, strict=True)]

    def has_room(self, counts: BlockCounts) -> bool:
        """Tell whether all allocators together can hand out `counts` blocks."""
        needed = sum(a.num_missing_chunks(n) for a, n in zip(self.allocators, counts, strict=True))
        return needed <= self.pool.num_free

    def num_pages_read(self, request: Request, num_tokens: int) -> int:
        """Count the pages, over all layers, that a step reads which brings `request` to `num_tokens` tokens."""
        num_computed, num_pages = request.num_computed_tokens, 0
        for num_blocks_read, num_layers in self._page_readers:
            num_pages += num_blocks_read(num_computed, num_tokens) * num_layers
        return num_pages

    # Life of a request's blocks

    def hash_blocks(self, request: Request) -> Sequence[bytes]:
        """Give the hashes of the full blocks of `request`, each of all tokens up to its end; none without sharing."""
        if self._sharing is not None:
            extend_block_hashes(request.block_hashes, request.token_ids, self._sharing.page_size)
        return request.block_hashes

    def admit(self, request: Request, reserved: BlockCounts, num_tokens: int | None = None) -> Admission:
        """Let `request` join with the blocks of its longest cached prefix, if the rest of its tokens has room.

        Room is needed for `num_tokens`, by default for those that it has; `reserved` blocks are promised to others.
        Raises `num_computed_tokens` to what was matched, where less was computed. Where the answer is not JOINED
        nothing has been allocated.
        """
        matched: list[int] = []
        if self._sharing is not None:
            matchable = self.hash_blocks(request)[: self._num_matchable(request, self._sharing.page_size)]
            matched = self._sharing.index.match(matchable)
            is_next_in_flight = len(matched) < len(matchable) and matchable[len(matched)] in self._in_flight
            if is_next_in_flight and not request.host_pages:
                return Admission.AWAITS_PREFIX
        missing = self.num_missing_blocks(request, request.num_tokens if num_tokens is None else num_tokens)
        needed = [n + r for n, r in zip(missing, reserved, strict=True)]
        if self._sharing is not None:
            needed[0] += self._sharing.num_initialized_among(matched) - len(matched)
        if not self.has_room(needed):
            return Admission.NO_ROOM
        if self._sharing is not None:
            self._sharing.share(request.tables[0], matched)
            self._count_slots(request)
            num_matched = len(matched) * self._sharing.page_size
            request.num_computed_tokens = max(request.num_computed_tokens, num_matched)
            for digest in request.block_hashes[request.num_computed_tokens // self._sharing.page_size :]:
                self._in_flight.setdefault(digest, request)
        return Admission.JOINED

    def _num_matchable(self, request: Request, page_size: int) -> int:
        """Count the blocks that `request` could take from others."""
        if request.host_pages:
            return request.num_computed_tokens // page_size
        if request.scores_prompt and request.logprobs is not None:
            return request.logprobs.num_scored // page_size
        # At least one token is computed, or there would be no logits to sample from.
        return (request.num_tokens - 1) // page_size

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Grow all tables of `request` in place to hold `num_tokens` tokens, or none of them."""
        if num_tokens <= request.num_slots:
            return True
        if not self.has_room(self.num_missing_blocks(request, num_tokens)):
            return False
        for allocator, table in zip(self.allocators, request.tables, strict=True):
            allocator.extend(table, num_tokens)
        self._count_slots(request)
        return True

    def commit(self, request: Request, num_before: int, num_computed: int) -> None:
        """Make the blocks findable that a step completed, which came from `num_before` to `num_computed` tokens."""
        if self._sharing is None:
            return
        page_size = self._sharing.page_size
        first, stop = num_before // page_size, num_computed // page_size
        if first == stop:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, page_size)
        for i in range(first, stop):
            digest = request.block_hashes[i]
            self._sharing.index.register(digest, request.tables[0][i])
            if self._in_flight.get(digest) is request:
                del self._in_flight[digest]

    def release(self, request: Request, *, keep_content: bool = True) -> None:
        """Take back all blocks of `request`; what it had completed stays findable unless the request failed."""
        for digest in request.block_hashes if self._sharing is not None else ():
            if self._in_flight.get(digest) is request:
                del self._in_flight[digest]
        for allocator, table in zip(self.allocators, request.tables, strict=True):
            allocator.release(table, keep_content=keep_content)
        self._count_slots(request)

    def _count_slots(self, request: Request) -> None:
        request.num_slots = min(a.num_slots(t) for a, t in zip(self.allocators, request.tables, strict=True))

    # Where the content lies

    def pages_per_block(self, allocator: int) -> int:
        """Count the pages of one block of an attention type: its layers."""
        return len(self.allocators[allocator].layers)

    def pages_in_use(self, request: Request) -> list[int]:
        """List the pages that hold computed tokens of `request`, block after block, a page a layer."""
        return [
            block + layer * self.pool.num_chunks
            for allocator, table in zip(self.allocators, request.tables, strict=True)
            for block in table[: allocator.num_missing_blocks(make_table(), request.num_computed_tokens)]
            for layer in range(len(allocator.layers))
        ]

    # What a report shows

    def load(self, num_filled: Mapping[Request, int]) -> CacheLoad:
        """Tell how full the cache is; `num_filled` as for `waste_fraction`."""
        num_layers = sum(len(a.layers) for a in self.allocators)
        owned, total = self._owned_pages(), self.pool.num_usable * self.pool.pages_per_chunk
        cached = 0 if self._sharing is None else self._sharing.num_initialized_blocks * num_layers
        return CacheLoad(
            owned_blocks=owned / num_layers,
            cached_blocks=cached / num_layers,
            free_blocks=(total - owned - cached) / num_layers,
            usage=owned / total,
            waste=self.waste_fraction(num_filled),
        )

    def tokens_in_pages(self, num_pages: int) -> float:
        """Convert pages, each one layer's, to tokens of the whole model."""
        return num_pages * self.allocators[0].page_size / sum(len(a.layers) for a in self.allocators)

    @property
    def usage(self) -> float:
        """Share of the cache that requests own, 0 to 1."""
        return self._owned_pages() / (self.pool.num_usable * self.pool.pages_per_chunk)

    def waste_fraction(self, num_filled: Mapping[Request, int]) -> float | None:
        """Share of the allocated slots that hold no token, shared blocks counted once; None while nothing is.

        `num_filled` says of every request that owns blocks how many tokens are in them.
        """
        allocated = sum(a.num_owned_blocks * a.page_size * len(a.layers) for a in self.allocators)
        if allocated == 0:
            return None
        wasted = sum(
            allocator.num_wasted_slots(table, num_tokens) * len(allocator.layers)
            for request, num_tokens in num_filled.items()
            for allocator, table in zip(self.allocators, request.tables, strict=True)
        )
        return wasted / allocated

    def _owned_pages(self) -> int:
        return sum(a.num_owned_blocks * len(a.layers) for a in self.allocators)


def _max_tokens_alone(pool: CachePool, allocators: Sequence[CacheAllocator]) -> int:
    """Count the tokens that fit where a single request has the whole cache."""

    def num_chunks(num_tokens: int) -> int:
        blocks = (a.num_missing_blocks(make_table(), num_tokens) for a in allocators)
        return sum(ceil_div(n, pool.pages_per_chunk // len(a.layers)) for a, n in zip(allocators, blocks, strict=True))

    most = pool.num_usable * pool.pages_per_chunk * max(a.page_size for a in allocators)
    return bisect_right(range(most + 1), pool.num_usable, key=num_chunks) - 1
