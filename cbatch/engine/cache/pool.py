"""The shared store of KV memory, handed out in chunks to the allocators of the attention types.

    page    page_size tokens of KV for one layer
    block   one page per layer of one attention type
    chunk   what the pool hands out: a whole number of blocks of every attention type

A chunk is one page in each of `pages_per_chunk` lanes, and a lane is one page of every chunk, side by side:

               chunk 0  chunk 1  chunk 2  …        page index = lane · num_chunks + chunk
    lane 0     [ page ] [ page ] [ page ]
    lane 1     [ page ] [ page ] [ page ]
    …

A block of a type with L layers takes L consecutive lanes of its chunk. Its id is the page index of its first layer;
layer i's page is i · num_chunks further on. One table of block ids thus serves all layers of a type (a kernel gets
the page store from lane i on), the pages of a layer stay close together, and blocks of any type tile the same bytes.

Chunks 0 and 1 are the targets of padded reads and writes and are never handed out.
"""

from __future__ import annotations

NUM_RESERVED_CHUNKS = 2
PADDING_READ_CHUNK = 0
PADDING_WRITE_CHUNK = 1


class CachePool:
    """Knows which chunks are free. The tensors behind them belong to the model runner."""

    def __init__(self, num_chunks: int, pages_per_chunk: int) -> None:
        assert num_chunks > NUM_RESERVED_CHUNKS
        self.num_chunks = num_chunks  # reserved ones included
        self.pages_per_chunk = pages_per_chunk
        # Popped from the end, so that low chunks go first and memory never needed is never touched.
        self._free = list(range(num_chunks - 1, NUM_RESERVED_CHUNKS - 1, -1))

    @property
    def num_usable(self) -> int:
        return self.num_chunks - NUM_RESERVED_CHUNKS

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Hand out a free chunk; the caller has checked `num_free`."""
        return self._free.pop()

    def give_back(self, chunk: int) -> None:
        assert NUM_RESERVED_CHUNKS <= chunk < self.num_chunks
        self._free.append(chunk)
