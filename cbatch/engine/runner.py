"""Runs the model over one step's batch: owns the page tensors, calls the forward pass, samples.

The engine calls `run` once a step. Leaves out what the tokens mean for the requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch.engine.batch import BatchBuilder, StepInputs
from cbatch.engine.cache.allocator import CacheAllocator
from cbatch.engine.cache.pool import CachePool
from cbatch.engine.determinism import ROWS_PER_THREAD
from cbatch.engine.graphs import CaptureDevice, GraphedForward
from cbatch.engine.huge_pages import advise_huge_pages
from cbatch.engine.offload import Moves
from cbatch.engine.sampling import sample
from cbatch.engine.speculation import Results, accept
from cbatch.engine.step import StepPlan
from cbatch.errors import RowError
from cbatch.models.attention import PagedStep, name_layer_type
from cbatch.models.load import LoadedModel


class ModelRunner:
    """A loaded model with the cache memory that it reads and writes."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: CachePool,
        allocators: Sequence[CacheAllocator],
        num_host_pages: int,
        row_multiple: int | None = None,
    ) -> None:
        """With a `row_multiple` (see determinism.py) what a token gets does not depend on the batch, to the bit."""
        shape, page_size = loaded.shape, allocators[0].page_size
        pages = (pool.pages_per_chunk * pool.num_chunks, shape.num_kv_heads, page_size, shape.head_dim)
        # Not zeroed: memory that no token was written to is never read into a result, and so never paid for.
        self.key_pages = torch.empty(pages, dtype=loaded.dtype, device=loaded.device)
        self.value_pages = torch.empty_like(self.key_pages)
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
        self._builder = BatchBuilder(allocators, loaded.device, row_multiple)
        lanes = {layer: lane for allocator in allocators for lane, layer in enumerate(allocator.layers)}
        offsets = [lanes[layer] * pool.num_chunks for layer in range(shape.num_layers)]
        self._layer_keys = [self.key_pages[offset:] for offset in offsets]
        self._layer_values = [self.value_pages[offset:] for offset in offsets]
        windows = [shape.sliding_windows[allocator.layers[0]] for allocator in allocators]
        self._types = [name_layer_type(window) for window in windows]
        type_of = {layer: i for i, allocator in enumerate(allocators) for layer in allocator.layers}
        self._layer_types = [self._types[type_of[layer]] for layer in range(shape.num_layers)]
        self._num_tokens = loaded.num_choosable
        self._page_sizes = [allocator.page_size for allocator in allocators]
        self._graphed: GraphedForward | None = None

    def replay_on(
        self,
        device: CaptureDevice,
        *,
        max_rows: int,
        q_padding_interval_size: int,
        kv_padding_interval_size: int,
    ) -> None:
        """Capture decode steps and replay them from now on; see graphs.py."""
        self._graphed = GraphedForward(
            self._forward,
            device,
            max_rows=max_rows,
            page_sizes=self._page_sizes,
            q_padding_interval_size=q_padding_interval_size,
            kv_padding_interval_size=kv_padding_interval_size,
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Results]:
        """Compute a step; return what it gives each request that samples, in plan order."""
        self._move_pages(plan.moves)
        inputs = self._builder.build(plan)
        logits = self._forward(inputs) if self._graphed is None else self._graphed(inputs)
        choices = logits[: sum(map(len, inputs.result_rows)), : self._num_tokens]
        tokens = sample(choices, inputs.sampling)
        of_rows = self._check(choices, tokens, inputs)
        items = [item for item in plan.items if item.num_results]
        results = [
            accept(item.drafts, of_rows[rows.start : rows.stop])
            for item, rows in zip(items, inputs.result_rows, strict=True)
        ]
        if inputs.scoring is not None:
            counted = {
                row for rows, taken in zip(inputs.result_rows, results, strict=True) for row in rows[: len(taken)]
            }
            inputs.scoring.score(logits, tokens, self._num_tokens, counted)
        for i, record in enumerate(item.request.logprobs for item in items):
            if record is not None and not record.is_finite:
                results[i] = [_not_finite(logits.dtype)]
        return results

    def _check(self, choices: Tensor, tokens: Tensor, inputs: StepInputs) -> list[int | RowError]:
        """Put failures in the place of tokens [R] that nothing could choose by their logits [R, tokens]."""
        results: list[int | RowError] = tokens.tolist()
        for row, error in inputs.sampling.errors().items():
            results[row] = error
        for row, is_finite in enumerate(torch.isfinite(choices.amax(dim=-1)).tolist()):
            if not is_finite:
                results[row] = _not_finite(choices.dtype)
        return results

    def _move_pages(self, moves: Moves) -> None:
        """Carry out a step's copies between cache and host, all pages of a direction in one transfer, only once."""
        stores = ((self.key_pages, self.host_key_pages), (self.value_pages, self.host_value_pages))
        if moves.out:
            pages = torch.tensor(moves.out.cache_pages, device=self.key_pages.device)
            for cache, host in stores:
                host[moves.out.host_pages] = cache.index_select(0, pages).to(host.device)
            moves.out.clear()
        if moves.back:
            pages = torch.tensor(moves.back.cache_pages, device=self.key_pages.device)
            for cache, host in stores:
                cache.index_copy_(0, pages, host[moves.back.host_pages].to(cache.device))
            moves.back.clear()

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Return the logits [R + P, vocab] of the tokens that sample or are scored; write the step's KV in place."""
        paged = PagedStep(
            key_pages=self._layer_keys,
            value_pages=self._layer_values,
            layer_types=self._layer_types,
            inputs=dict(zip(self._types, inputs.attention, strict=True)),
            row_multiple=self._attention_rows,
        )
        # Where none is wanted one row is computed all the same: an empty index means "all" to no model, but costs
        # less to avoid than to prove.
        wanted = inputs.logits_indices if len(inputs.logits_indices) else inputs.logits_indices.new_zeros(1)
        output = self._model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=wanted,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        return logits


def _not_finite(dtype: torch.dtype) -> RowError:
    name = str(dtype).removeprefix("torch.")
    way_out = "the weights are damaged, or not of this model" if dtype == torch.float32 else "try --dtype float32"
    return RowError("non_finite_logits", f"the model's logits are not finite in {name}: {way_out}")
