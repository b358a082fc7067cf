"""Turns a step's plan, host lists of the scheduler, into the tensors that the model reads.

Called by the model runner once a step. Sequences are laid end to end, those with a single token first, as the
kernels want them; nothing is padded to a common length. A token that the step before is still to choose has a place
kept for it, and is carried there on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.shared_prefix import SharedPrefixes, find_groups
from cbatch_kernels.upload import to_device
from torch import Tensor

from cbatch.engine.cache.allocator import BlockTable, CacheAllocator
from cbatch.engine.cache.pool import PADDING_READ_CHUNK, PADDING_WRITE_CHUNK
from cbatch.engine.logprobs import PromptPart, ScoringBatch, part_of_prompt
from cbatch.engine.request import NextToken, Request
from cbatch.engine.sampling import SamplingBatch
from cbatch.engine.step import ScheduledRequest, StepPlan
from cbatch.models.attention import AttentionInputs


@dataclass(frozen=True, slots=True)
class Carried:
    """Tokens that the step before chooses: int64 [k] on the device each."""

    places: Tensor  # among the T query tokens
    rows: Tensor  # of the tokens that it chose


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on the device: T query tokens of S sequences, R of which tell a token each."""

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    attention: list[AttentionInputs]  # one per attention type, as the allocators
    logits_indices: Tensor  # int64 [R + P]: the query tokens whose logits are wanted: to sample, then to score
    sampling: SamplingBatch
    scoring: ScoringBatch | None
    result_rows: list[range]  # for each request that samples, in plan order, its rows among the R
    carried: Carried | None = None

    def carry(self, input_ids: Tensor, chosen: Tensor) -> None:
        """Fill in what was not known, in place: input_ids int64 [1, T or more], chosen int64 [R of the step before]."""
        if self.carried is not None:
            input_ids[0, self.carried.places] = chosen[self.carried.rows]


class BatchBuilder:
    """Builds `StepInputs` for one model's attention types."""

    def __init__(
        self,
        allocators: Sequence[CacheAllocator],
        device: torch.device,
        row_multiple: int | None = None,
        finds_prefixes: Sequence[bool] | None = None,
    ) -> None:
        """Query tokens and logits are padded to a whole number of `row_multiple`, where that is given.

        `finds_prefixes` tells of each attention type whether its kernel wants to know which rows begin alike.
        """
        self._allocators = allocators
        self._device = device
        self._row_multiple = row_multiple or 1
        self._finds_prefixes = finds_prefixes or [False] * len(allocators)

    def build(self, plan: StepPlan, rows_before: Mapping[Request, int] | None = None) -> StepInputs:
        """Lay out a plan with at least one item.

        `rows_before` tells which row of the step before chooses a request's token, where that is not known yet.
        """
        order = sorted(range(len(plan.items)), key=lambda i: plan.items[i].num_tokens > 1)
        items = [plan.items[i] for i in order]
        query_lens = np.array([item.num_tokens for item in items], dtype=np.int32)
        starts = np.array([item.num_computed_before for item in items], dtype=np.int64)
        stops = np.cumsum(query_lens, dtype=np.int64)
        positions = _ragged_positions(starts, query_lens)
        num_results = np.array([item.num_results for item in items], dtype=np.int32)
        ends = np.cumsum(num_results).tolist()
        rows = {i: range(end - count, end) for i, end, count in zip(order, ends, num_results.tolist(), strict=True)}
        tokens = [NextToken(item.request, item.drafts[:i]) for item in items for i in range(item.num_results)]
        parts, scored_tokens = _prompt_parts(items, stops - query_lens)
        return StepInputs(
            input_ids=self._padded(_step_tokens(items))[None],
            position_ids=self._padded(positions)[None],
            attention=[self._attention(i, items, positions, query_lens) for i in range(len(self._allocators))],
            logits_indices=self._padded(
                np.concatenate([_ragged_positions(stops - num_results, num_results), *scored_tokens])
            ),
            sampling=SamplingBatch.build(tokens),
            scoring=ScoringBatch.build(tokens, parts),
            result_rows=[rows[i] for i, item in enumerate(plan.items) if item.num_results],
            carried=self._carried(items, stops, rows_before or {}),
        )

    def _carried(
        self, items: list[ScheduledRequest], stops: npt.NDArray[np.int64], rows_before: Mapping[Request, int]
    ) -> Carried | None:
        """Find the query tokens that are not known yet: the last one of a request at most."""
        carried = [
            (stop - 1, rows_before[item.request])
            for item, stop in zip(items, stops.tolist(), strict=True)
            if item.num_computed_before + item.num_tokens - len(item.drafts) > len(item.request.token_ids)
        ]
        if not carried:
            return None
        places, rows = np.array(carried, dtype=np.int64).T
        return Carried(self._to_device(np.ascontiguousarray(places)), self._to_device(np.ascontiguousarray(rows)))

    def _attention(
        self,
        index: int,
        items: list[ScheduledRequest],
        positions: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int32],
    ) -> AttentionInputs:
        allocator = self._allocators[index]
        windows = [
            allocator.read_window(
                item.request.tables[index], item.num_computed_before, item.num_computed_before + item.num_tokens
            )
            for item in items
        ]
        tables = _joined_tables([window.blocks for window in windows])
        starts = np.array([window.start for window in windows], dtype=np.int64)
        sequence = np.repeat(np.arange(len(items)), query_lens)
        relative = positions - starts[sequence]
        blocks = tables[sequence, relative // allocator.page_size].astype(np.int64)
        context_lens = np.array([item.num_computed_before + item.num_tokens for item in items], dtype=np.int64) - starts
        num_single = int(np.count_nonzero(query_lens == 1))  # the leading ones
        prefixes = self._find_prefixes(index, tables[:num_single], context_lens[:num_single].astype(np.int32))
        return AttentionInputs(
            slot_mapping=self._padded(
                blocks * allocator.page_size + relative % allocator.page_size,
                with_value=PADDING_WRITE_CHUNK * allocator.page_size,
            ),
            metadata=PagedMetadata.build(
                query_lens, context_lens.astype(np.int32), self._to_device(tables), starts.astype(np.int32), prefixes
            ),
        )

    def _find_prefixes(
        self, index: int, tables: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32]
    ) -> SharedPrefixes | None:
        """Find which of the rows with a single token begin with the same pages."""
        page_size = self._allocators[index].page_size
        groups = find_groups(tables, context_lens, page_size) if self._finds_prefixes[index] else []
        return SharedPrefixes.build(groups, len(tables), page_size, self._device) if groups else None

    def _padded(self, values: npt.NDArray[np.int64], with_value: int = 0) -> Tensor:
        """Fill up to a whole number of rows; an empty list stays empty."""
        missing = -len(values) % self._row_multiple
        return self._to_device(np.pad(values, (0, missing), constant_values=with_value) if missing else values)

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self._device)


def _joined_tables(tables: list[BlockTable]) -> npt.NDArray[np.int32]:
    """Put block tables below each other, one a row, filled up with a block that padding is read from."""
    lens = np.array([len(table) for table in tables])
    columns = np.arange(lens.max())
    joined = np.full((len(tables), len(columns)), PADDING_READ_CHUNK, dtype=np.int32)
    joined[columns < lens[:, None]] = np.frombuffer(b"".join(tables), dtype=np.int32)
    return joined


def _prompt_parts(
    items: list[ScheduledRequest], first_tokens: npt.NDArray[np.int64]
) -> tuple[list[PromptPart], list[npt.NDArray[np.int64]]]:
    """Find which prompts the step scores, and by which of its query tokens."""
    parts, tokens = [], []
    for item, first_token in zip(items, first_tokens, strict=True):
        start = item.num_computed_before
        if part := part_of_prompt(item.request, start, start + item.num_tokens):
            parts.append(part)
            tokens.append(first_token + part.first - start + np.arange(part.count, dtype=np.int64))
    return parts, tokens


def _step_tokens(items: list[ScheduledRequest]) -> npt.NDArray[np.int64]:
    """Give the query tokens of all items; for one that is not known yet a token that every model has."""
    tokens: list[int] = []
    for request, num_tokens, start, _, _, drafts in items:
        num_own = num_tokens - len(drafts)
        own = request.token_ids[start : start + num_own]
        tokens += own
        if len(own) < num_own:
            tokens += [0] * (num_own - len(own))
        tokens += drafts
    return np.array(tokens, dtype=np.int64)


def _ragged_positions(starts: npt.NDArray[np.int64], lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Count up from every start for as many tokens as its length says, all in one array."""
    offsets = np.cumsum(lens, dtype=np.int64) - lens
    positions: npt.NDArray[np.int64] = np.arange(int(lens.sum()), dtype=np.int64) + np.repeat(starts - offsets, lens)
    return positions
