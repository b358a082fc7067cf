"""The shape of one step's ragged batch, as the kernels read it.

Built once a step by the engine for each attention type of the model, read by every layer of that type.
Leaves out what differs from layer to layer (pages, window, scaling) and where new tokens are written (slots).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cbatch_kernels.shared_prefix import SharedPrefixes
from cbatch_kernels.upload import to_device

HostLengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """S sequences whose T query tokens lie one after another; rows with one query token come first.

    Sequence s owns the query tokens `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, the last ones of its context of
    `context_lens[s]` tokens, this step's included. Context token i lies in page `block_tables[s, i // page_size]` at
    offset `i % page_size`. Table entries past the context, and with a window those wholly before it, may hold any
    valid page: they are never read into a result.
    """

    cu_seqlens_q: Tensor  # int32 [S + 1], on the device, as the next two
    context_lens: Tensor  # int32 [S]
    block_tables: Tensor  # int32 [S, max_blocks]
    query_lens_host: HostLengths  # int32 [S]; the host's copies spare kernels a synchronisation
    context_lens_host: HostLengths  # int32 [S]
    num_decode_rows: int  # leading sequences with exactly one query token
    num_query_tokens: int  # T; a query tensor may be longer, the rest is padding
    max_query_len: int
    max_context_len: int
    context_starts: Tensor | None = None  # int32 [S]: the position of context token 0; None: 0 for all
    context_starts_host: HostLengths | None = None
    prefixes: SharedPrefixes | None = None  # among the leading rows; None: nobody looked, or there are none

    @classmethod
    def build(
        cls,
        query_lens: HostLengths,
        context_lens: HostLengths,
        block_tables: Tensor,
        context_starts: HostLengths | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> PagedMetadata:
        """Derive everything else from the lengths (int32 [S], host) and the tables, on the tables' device."""
        assert len(query_lens) == len(context_lens) == len(block_tables) > 0
        assert (query_lens >= 1).all()
        assert (query_lens <= context_lens).all(), "a context ends with its query tokens"
        long_rows = np.flatnonzero(query_lens > 1)
        cumulative = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cumulative[1:])
        device = block_tables.device
        return cls(
            cu_seqlens_q=to_device(cumulative, device),
            context_lens=to_device(context_lens.astype(np.int32), device),
            block_tables=block_tables,
            query_lens_host=query_lens,
            context_lens_host=context_lens,
            num_decode_rows=int(long_rows[0]) if len(long_rows) else len(query_lens),
            num_query_tokens=int(cumulative[-1]),
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
            context_starts=None if context_starts is None else to_device(context_starts, device),
            context_starts_host=context_starts,
            prefixes=prefixes,
        )
