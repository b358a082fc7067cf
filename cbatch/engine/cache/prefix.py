"""Finds completed blocks by content. The hash of a block covers its tokens and, chained, all tokens before it.

Blocks are registered once all their KV is computed, never before: a half-filled block is never found, and neither
is one of a request that failed midway. 16 bytes of BLAKE2b make a false hit less likely than a memory error.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], page_size: int) -> None:
    """Append to `hashes` in place the hash of every full block of `token_ids` that it lacks."""
    for block in range(len(hashes), len(token_ids) // page_size):
        parent = hashes[-1] if hashes else b""
        tokens = array("q", token_ids[block * page_size : (block + 1) * page_size])
        hashes.append(blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest())


class PrefixIndex:
    """Maps the hash of a completed block to the block, one block for each content."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `hashes`."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, digest: bytes, block: int) -> None:
        """Make a completed block findable, unless an equal one already is."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
