"""Runs the model over one step's batch: owns the page tensors, calls the forward pass, samples.

The engine calls `launch` once a step. A step is prepared on the host and computed by the device, which may still be at
the step before. Leaves out what the tokens mean for the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from cbatch_kernels import dispatch
from cbatch_kernels.attention_libraries import Attend
from cbatch_kernels.huge_pages import advise_huge_pages
from torch import Tensor

from cbatch.engine.batch import BatchBuilder, StepInputs
from cbatch.engine.cache.allocator import CacheAllocator
from cbatch.engine.cache.pool import CachePool
from cbatch.engine.determinism import ROWS_PER_THREAD
from cbatch.engine.graphs import CaptureDevice, GraphedForward, StagedForward
from cbatch.engine.offload import Moves
from cbatch.engine.request import Request
from cbatch.engine.results import LaunchedStep
from cbatch.engine.sampling import sample
from cbatch.engine.step import StepPlan
from cbatch.engine.transfers import StreamTransfers, Transfers
from cbatch.models.attention import PagedStep, name_layer_type
from cbatch.models.load import LoadedModel


class PreparedStep(NamedTuple):
    """What of a step can be made before the one ahead of it has run."""

    staged: StagedForward
    graphed: GraphedForward | None = None  # whose buffers it has


class ModelRunner:
    """A loaded model with the cache memory that it reads and writes."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: CachePool,
        allocators: Sequence[CacheAllocator],
        num_host_pages: int,
        row_multiple: int | None = None,
        attend: Attend | None = None,
    ) -> None:
        """With a `row_multiple` (see determinism.py) what a token gets does not depend on the batch, to the bit.

        With `attend` a library's attention runs in the place of ours.
        """
        shape, page_size = loaded.shape, allocators[0].page_size
        pages = (pool.pages_per_chunk * pool.num_chunks, shape.num_kv_heads, page_size, shape.head_dim)
        # Not zeroed: memory that no token was written to is never read into a result, and so never paid for.
        self.key_pages = torch.empty(pages, dtype=loaded.dtype, device=loaded.device)
        self.value_pages = torch.empty_like(self.key_pages)
        self._attend = attend
        if attend is not None:  # a library weighs with zero what ours does not read
            self.key_pages.zero_()
            self.value_pages.zero_()
        advise_huge_pages(self.key_pages)
        advise_huge_pages(self.value_pages)
        # Pinned, so that copies need no staging; where the model runs on the CPU an ordinary second buffer.
        on_gpu = loaded.device.type == "cuda"
        self.host_key_pages = torch.empty((num_host_pages, *pages[1:]), dtype=loaded.dtype, pin_memory=on_gpu)
        self.host_value_pages = torch.empty_like(self.host_key_pages, pin_memory=on_gpu)
        self._model = loaded.model
        # Attention multiplies rows of its own, over no packed weights.
        least = ROWS_PER_THREAD * loaded.num_threads
        self._attention_rows = None if row_multiple is None else max(row_multiple, least)
        lanes = {layer: lane for allocator in allocators for lane, layer in enumerate(allocator.layers)}
        offsets = [lanes[layer] * pool.num_chunks for layer in range(shape.num_layers)]
        self._layer_keys = [self.key_pages[offset:] for offset in offsets]
        self._layer_values = [self.value_pages[offset:] for offset in offsets]
        windows = [shape.sliding_windows[allocator.layers[0]] for allocator in allocators]
        ours = row_multiple is None and attend is None
        walks_prefixes = ours and dispatch.takes_shared_prefixes(loaded.device, shape.head_dim)
        finds_prefixes = [walks_prefixes and window is None for window in windows]
        self._builder = BatchBuilder(allocators, loaded.device, row_multiple, finds_prefixes)
        self._types = [name_layer_type(window) for window in windows]
        type_of = {layer: i for i, allocator in enumerate(allocators) for layer in allocator.layers}
        self._layer_types = [self._types[type_of[layer]] for layer in range(shape.num_layers)]
        self._num_tokens = loaded.num_choosable
        self._page_sizes = [allocator.page_size for allocator in allocators]
        self._graphed: list[GraphedForward] = []  # one for each set of buffers, the next step's first
        self._transfers = Transfers()
        self._chosen = torch.empty(0, dtype=torch.int64, device=loaded.device)  # by the last step that was launched
        self._rows: dict[Request, int] = {}  # which of these are whose

    def replay_on(
        self,
        device: CaptureDevice,
        *,
        max_rows: int,
        q_padding_interval_size: int,
        kv_padding_interval_size: int,
        num_sets: int = 1,
    ) -> None:
        """Capture decode steps and replay them from now on; see graphs.py. Steps take turns in sets of buffers."""
        self._graphed = [
            GraphedForward(
                self._forward,
                device,
                max_rows=max_rows,
                page_sizes=self._page_sizes,
                q_padding_interval_size=q_padding_interval_size,
                kv_padding_interval_size=kv_padding_interval_size,
            )
            for _ in range(num_sets)
        ]

    def transfer_beside(self) -> None:
        """Copy on CUDA streams beside the one that computes from now on, so that nothing waits for a step to end."""
        self._transfers = StreamTransfers()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute a step behind those that were launched before; on a GPU the host does not wait for it."""
        prepared = self._prepare(plan)
        try:
            launched = self._compute(plan, prepared)
        except BaseException:
            self._transfers.settle()
            raise
        self._advance(plan, prepared)
        return launched

    def settle(self) -> None:
        """Wait for steps whose results nobody collects any more."""
        self._transfers.settle()

    @torch.inference_mode()
    def _prepare(self, plan: StepPlan) -> PreparedStep:
        """Make a step's inputs: all that the host needs to know of its requests."""
        with self._transfers.uploading():
            inputs = self._builder.build(plan, self._rows)
            if not self._graphed:
                return PreparedStep(StagedForward(inputs))
            return PreparedStep(self._graphed[0].stage(inputs), self._graphed[0])

    @torch.inference_mode()
    def _compute(self, plan: StepPlan, prepared: PreparedStep) -> LaunchedStep:
        """Move pages, run the model, choose tokens: what a device does in the order in which it is asked to."""
        staged, graphed = prepared
        inputs = staged.inputs
        self._transfers.await_upload()
        self._move_pages(plan.moves)
        if graphed is None:
            inputs.carry(inputs.input_ids, self._chosen)
            logits = self._forward(inputs)
        else:
            logits = graphed.run(staged, self._chosen)
        choices = logits[: sum(map(len, inputs.result_rows)), : self._num_tokens]
        chosen = sample(choices, inputs.sampling)
        results = [chosen, torch.isfinite(choices.amax(dim=-1))]
        if inputs.scoring is not None:
            results += inputs.scoring.score(logits, chosen, self._num_tokens)
        launched = LaunchedStep(plan, inputs, self._transfers.fetch(results), logits.dtype)
        self._chosen = chosen  # only now: a step that fails is launched again, behind the same one
        return launched

    @torch.inference_mode()
    def rehearse(self, inputs: StepInputs) -> None:
        """Compute a made-up step, of which nothing is kept, to its end."""
        logits = self._forward(inputs)
        sample(logits[:, : self._num_tokens], inputs.sampling)

    def _advance(self, plan: StepPlan, prepared: PreparedStep) -> None:
        """Take note of a step that was launched; the next one has other buffers, if there are more than one set."""
        items = (item for item in plan.items if item.num_results)
        rows = prepared.staged.inputs.result_rows
        self._rows = {item.request: of_item.stop - 1 for item, of_item in zip(items, rows, strict=True)}
        self._graphed = [*self._graphed[1:], *self._graphed[:1]]

    def _move_pages(self, moves: Moves) -> None:
        """Carry out a step's copies between cache and host, all pages of a direction in one transfer, only once."""
        stores = ((self.key_pages, self.host_key_pages), (self.value_pages, self.host_value_pages))
        if moves.out:
            for cache, host in stores:
                self._transfers.page_out(cache, host, moves.out)
            moves.out.clear()
        if moves.back:
            for cache, host in stores:
                self._transfers.page_in(cache, host, moves.back)
            moves.back.clear()

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Return the logits [R + P, vocab] of the tokens that sample or are scored; write the step's KV in place."""
        # Where none is wanted one row is computed all the same: an empty index means "all" to no model, but costs
        # less to avoid than to prove.
        wanted = inputs.logits_indices if len(inputs.logits_indices) else inputs.logits_indices.new_zeros(1)
        paged = PagedStep(
            key_pages=self._layer_keys,
            value_pages=self._layer_values,
            layer_types=self._layer_types,
            inputs=dict(zip(self._types, inputs.attention, strict=True)),
            row_multiple=self._attention_rows,
            attend=self._attend,
            wanted=wanted,
        )
        output = self._model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=wanted,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        return logits
