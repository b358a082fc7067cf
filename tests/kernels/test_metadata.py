"""The derived fields of a batch's metadata."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cbatch_kernels.metadata import PagedMetadata


def build(query_lens: list[int], context_lens: list[int]) -> PagedMetadata:
    tables = torch.zeros(len(query_lens), 2, dtype=torch.int32)
    return PagedMetadata.build(np.array(query_lens, dtype=np.int32), np.array(context_lens, dtype=np.int32), tables)


def test_lengths_and_offsets_follow_from_the_rows() -> None:
    metadata = build([1, 1, 4, 1], [9, 1, 6, 3])
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 6, 7]
    assert metadata.context_lens.tolist() == [9, 1, 6, 3]
    assert metadata.cu_seqlens_q.dtype == metadata.context_lens.dtype == torch.int32
    assert (metadata.num_query_tokens, metadata.max_query_len, metadata.max_context_len) == (7, 4, 9)


@pytest.mark.parametrize(("query_lens", "expected"), [([1, 1], 2), ([1, 2, 1], 1), ([3], 0)])
def test_decode_rows_are_the_leading_ones_of_one_token(query_lens: list[int], expected: int) -> None:
    assert build(query_lens, [9] * len(query_lens)).num_decode_rows == expected


@pytest.mark.parametrize(("query_lens", "context_lens"), [([2], [1]), ([0], [1]), ([], []), ([1], [1, 2])])
def test_a_batch_that_cannot_be_is_an_assertion(query_lens: list[int], context_lens: list[int]) -> None:
    with pytest.raises(AssertionError):
        build(query_lens, context_lens)
