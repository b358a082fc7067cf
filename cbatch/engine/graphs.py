"""Decode steps as CUDA graphs: captured once for a padded shape, replayed with one call for a whole forward pass.

The model runner hands its forward pass over. A graph reads tensors at fixed addresses, so there is one set of inputs
for all of them, as large as the largest; what a smaller step leaves of it is padding, which reads and writes reserved
pages. Steps with prompts in them, or with drafts, run as they are: their shapes hardly come again. Where the inputs
of a step are made while another one computes, the runner has two of these, each with its own set, and takes turns.

Leaves out the device itself (`CaptureDevice`), which tests replace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.shared_prefix import SharedPrefixes
from torch import Tensor

from cbatch.engine.batch import StepInputs
from cbatch.engine.cache.pool import PADDING_READ_CHUNK, PADDING_WRITE_CHUNK
from cbatch.models.attention import AttentionInputs
from cbatch.units import ceil_div

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64  # a job has a handful of shapes; each more costs a few MB and the time to capture it

Forward = Callable[[StepInputs], Tensor]


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded forward pass."""

    replay: Callable[[], None]
    logits: Tensor  # [rows, vocab], written by every replay


class CaptureDevice(Protocol):
    """What records kernels and runs them again."""

    def capture(self, body: Callable[[], Tensor]) -> Graph:
        """Record what `body` does on the device. Raises RuntimeError."""


class CudaCapture:
    """CUDA's own graphs, whose memory comes from one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], Tensor]) -> Graph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()  # once as it is: kernels are compiled, and libraries take their workspaces, outside the graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = body()
        return Graph(graph.replay, logits)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The padded shape of a decode step."""

    num_rows: int
    widths: tuple[int, ...]  # blocks of a row's table, for each attention type
    shares: tuple[bool, ...]  # whether rows attend to what they begin with together, for each attention type


@dataclass(frozen=True, slots=True)
class StagedForward:
    """A forward pass whose inputs are in place, but for tokens that are carried over."""

    inputs: StepInputs
    shape: GraphShape | None = None  # None: it runs as it is
    static: StepInputs | None = None  # what the graph of the shape reads


class GraphedForward:
    """A forward pass that replays decode steps."""

    def __init__(
        self,
        forward: Forward,
        device: CaptureDevice,
        *,
        max_rows: int,
        page_sizes: Sequence[int],
        q_padding_interval_size: int,
        kv_padding_interval_size: int,
    ) -> None:
        """`max_rows` of a step; rows are padded to a multiple of the one interval, contexts to one of the other."""
        self._forward = forward
        self._device = device
        self._row_interval = q_padding_interval_size
        self._max_rows = ceil_div(max_rows, q_padding_interval_size) * q_padding_interval_size
        self._block_intervals = [ceil_div(kv_padding_interval_size, size) for size in page_sizes]
        self._page_sizes = page_sizes
        self._graphs: dict[GraphShape, Graph] = {}
        self._inputs: dict[GraphShape, StepInputs] = {}  # by shapes of `max_rows` rows
        self._logits: Tensor | None = None  # [max_rows, vocab]: every graph writes to its first rows
        self._is_on = True

    def stage(self, inputs: StepInputs) -> StagedForward:
        """Put a step's inputs where its graph reads them, or will; captures nothing, and so touches no page."""
        shape = self._shape(inputs) if self._is_on else None
        if shape is None or (shape not in self._graphs and len(self._graphs) == MAX_GRAPHS):
            return StagedForward(inputs)
        static = self._view(shape, like=inputs)
        self._fill(static, inputs)
        return StagedForward(inputs, shape, static)

    def run(self, staged: StagedForward, chosen: Tensor) -> Tensor:
        """Give the logits of the step's own rows; `chosen` are the tokens of the step before, int64 [R of it]."""
        inputs = staged.inputs
        graph = None if staged.shape is None else self._find(staged.shape, inputs)
        if graph is None or staged.static is None:
            inputs.carry(inputs.input_ids, chosen)
            return self._forward(inputs)
        inputs.carry(staged.static.input_ids, chosen)
        graph.replay()
        return graph.logits[: inputs.input_ids.shape[1]]

    def _shape(self, inputs: StepInputs) -> GraphShape | None:
        """Give the padded shape of a step that only decodes; None for others."""
        metadata = inputs.attention[0].metadata
        num_rows = metadata.num_query_tokens
        if metadata.max_query_len > 1 or inputs.scoring is not None or len(inputs.logits_indices) != num_rows:
            return None
        widths = tuple(
            ceil_div(part.metadata.block_tables.shape[1], interval) * interval
            for part, interval in zip(inputs.attention, self._block_intervals, strict=True)
        )
        shares = tuple(part.metadata.prefixes is not None for part in inputs.attention)
        return GraphShape(ceil_div(num_rows, self._row_interval) * self._row_interval, widths, shares)

    def _find(self, shape: GraphShape, inputs: StepInputs) -> Graph | None:
        """Find a graph or capture it; None where that is not to be had."""
        # The largest one first, so that the others find their memory in the pool.
        for wanted in (replace(shape, num_rows=self._max_rows), shape):
            if shape not in self._graphs and wanted not in self._graphs and self._is_on:
                self._capture(wanted, inputs)
        return self._graphs.get(shape)

    def _capture(self, shape: GraphShape, inputs: StepInputs) -> None:
        """Capture a shape, while there is room for one more, with a step's inputs in it.

        A model that cannot be captured runs without from now on.
        """
        if len(self._graphs) == MAX_GRAPHS:
            return
        static = self._view(shape, like=inputs)
        self._fill(static, inputs)
        try:
            self._graphs[shape] = self._device.capture(lambda: self._keep(self._forward(static)))
        except RuntimeError as error:
            logger.warning("decode steps cannot be captured, and run without CUDA graphs: %s", error)
            self._is_on = False
            self._graphs.clear()

    def _keep(self, logits: Tensor) -> Tensor:
        """Copy logits to where all graphs leave theirs: with some each, a job of many shapes would keep gigabytes."""
        if self._logits is None:
            self._logits = logits.new_empty(self._max_rows, logits.shape[1])
        return self._logits[: logits.shape[0]].copy_(logits)

    def _view(self, shape: GraphShape, like: StepInputs | None = None) -> StepInputs:
        """Give the fixed inputs of a shape: the first rows of the largest of its kind."""
        largest, num_rows = replace(shape, num_rows=self._max_rows), shape.num_rows
        if largest not in self._inputs:
            assert like is not None
            self._inputs[largest] = self._allocate(largest, like)
        whole = self._inputs[largest]
        return StepInputs(
            input_ids=whole.input_ids[:, :num_rows],
            position_ids=whole.position_ids[:, :num_rows],
            attention=[_first_rows(part, num_rows) for part in whole.attention],
            logits_indices=whole.logits_indices[:num_rows],
            sampling=whole.sampling,
            scoring=None,
            result_rows=[],
        )

    def _allocate(self, shape: GraphShape, like: StepInputs) -> StepInputs:
        device, num_rows = like.input_ids.device, self._max_rows
        ones = np.ones(num_rows, dtype=np.int32)
        attention = []
        for width, shares, page_size in zip(shape.widths, shape.shares, self._page_sizes, strict=True):
            tables = torch.full((num_rows, width), PADDING_READ_CHUNK, dtype=torch.int32, device=device)
            longest = np.full(num_rows, width * page_size, dtype=np.int32)  # what launches are made for
            prefixes = SharedPrefixes.allocate(num_rows, device) if shares else None
            metadata = PagedMetadata.build(ones, longest, tables, np.zeros(num_rows, dtype=np.int32), prefixes)
            slots = torch.empty(num_rows, dtype=torch.int64, device=device)
            attention.append(AttentionInputs(slots, metadata))
        return StepInputs(
            input_ids=torch.zeros(1, num_rows, dtype=torch.int64, device=device),
            position_ids=torch.zeros(1, num_rows, dtype=torch.int64, device=device),
            attention=attention,
            logits_indices=torch.arange(num_rows, device=device),
            sampling=like.sampling,
            scoring=None,
            result_rows=[],
        )

    def _fill(self, static: StepInputs, inputs: StepInputs) -> None:
        """Copy a step's inputs to the fixed ones, in place; rows behind them become padding."""
        num_rows = inputs.input_ids.shape[1]
        for to, values in ((static.input_ids, inputs.input_ids), (static.position_ids, inputs.position_ids)):
            to[:, :num_rows].copy_(values)
            to[:, num_rows:].zero_()
        for part, given, page_size in zip(static.attention, inputs.attention, self._page_sizes, strict=True):
            part.slot_mapping[:num_rows].copy_(given.slot_mapping)
            part.slot_mapping[num_rows:].fill_(PADDING_WRITE_CHUNK * page_size)
            to_metadata, metadata = part.metadata, given.metadata
            to_metadata.context_lens[:num_rows].copy_(metadata.context_lens)
            to_metadata.context_lens[num_rows:].fill_(1)
            width = metadata.block_tables.shape[1]
            to_metadata.block_tables[:num_rows, :width].copy_(metadata.block_tables)
            to_metadata.block_tables[num_rows:].fill_(PADDING_READ_CHUNK)
            if to_metadata.context_starts is not None and metadata.context_starts is not None:
                to_metadata.context_starts[:num_rows].copy_(metadata.context_starts)
            if to_metadata.prefixes is not None and metadata.prefixes is not None:
                to_metadata.prefixes.copy_(metadata.prefixes)


def _first_rows(inputs: AttentionInputs, num_rows: int) -> AttentionInputs:
    whole = inputs.metadata
    assert whole.context_starts is not None
    assert whole.context_starts_host is not None
    metadata = PagedMetadata(
        cu_seqlens_q=whole.cu_seqlens_q[: num_rows + 1],
        context_lens=whole.context_lens[:num_rows],
        block_tables=whole.block_tables[:num_rows],
        query_lens_host=whole.query_lens_host[:num_rows],
        context_lens_host=whole.context_lens_host[:num_rows],
        num_decode_rows=num_rows,
        num_query_tokens=num_rows,
        max_query_len=1,
        max_context_len=whole.max_context_len,
        context_starts=whole.context_starts[:num_rows],
        context_starts_host=whole.context_starts_host[:num_rows],
        prefixes=None if whole.prefixes is None else whole.prefixes.first_rows(num_rows),
    )
    return AttentionInputs(inputs.slot_mapping[:num_rows], metadata)
