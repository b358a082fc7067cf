"""Copies between a device and the host: a step's inputs, its results, and the pages that move out and back.

Called by the model runner. `Transfers` makes them in the device's own queue, one after another with the forward passes;
`StreamTransfers` on streams beside it, so that the host prepares a step while the one before it computes. There a
stream waits for another only on the device, and the host for nothing but results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from cbatch_kernels.upload import to_device
from torch import Tensor

from cbatch.engine.offload import PageCopies

Fetched = Callable[[], Sequence[Tensor]]


class Transfers:
    """Copies in the device's own queue."""

    def uploading(self) -> AbstractContextManager[object]:
        """Give the context in which a step's inputs are made."""
        return nullcontext()

    def await_upload(self) -> None:
        """Let what is computed from now on see the inputs that were made."""

    def settle(self) -> None:
        """Wait for a device that may still read the inputs of a step that failed or was given up, and is forgotten."""

    def fetch(self, results: Sequence[Tensor]) -> Fetched:
        """Begin to copy results to the host; what is returned waits for them and gives them there."""
        return lambda: results

    def page_out(self, cache: Tensor, host: Tensor, copies: PageCopies) -> None:
        """Copy pages of `cache` [pages, ...] to those of `host`, in place."""
        pages = torch.tensor(copies.cache_pages, device=cache.device)
        host[copies.host_pages] = cache.index_select(0, pages).to(host.device)

    def page_in(self, cache: Tensor, host: Tensor, copies: PageCopies) -> None:
        """Copy pages of `host` [pages, ...] back to those of `cache`, in place."""
        pages = torch.tensor(copies.cache_pages, device=cache.device)
        cache.index_copy_(0, pages, host[copies.host_pages].to(cache.device))


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Results on their way to pinned memory of the host."""

    results: Sequence[Tensor]  # not to be freed before they are copied
    copies: Sequence[Tensor]
    arrived: torch.cuda.Event

    def __call__(self) -> Sequence[Tensor]:
        self.arrived.synchronize()
        return self.copies


class StreamTransfers(Transfers):
    """Copies on CUDA streams of their own.

    Inputs and results stay referenced until a step's results are collected, by when the device is done with them. All
    page copies are on one stream: a page of the host is read after it was written, whatever steps lie in between.
    """

    def __init__(self) -> None:
        self._inputs, self._results, self._pages = (torch.cuda.Stream() for _ in range(3))  # type: ignore[no-untyped-call]

    def uploading(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._inputs)

    def await_upload(self) -> None:
        torch.cuda.current_stream().wait_stream(self._inputs)

    def settle(self) -> None:
        torch.cuda.synchronize()

    def fetch(self, results: Sequence[Tensor]) -> Fetched:
        self._results.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._results):
            copies = [_pinned_like(result).copy_(result, non_blocking=True) for result in results]
            arrived = self._results.record_event()
        return _Arriving(results, copies, arrived)

    def page_out(self, cache: Tensor, host: Tensor, copies: PageCopies) -> None:
        gathered = cache.index_select(0, _cache_pages(copies, cache.device))
        self._pages.wait_stream(torch.cuda.current_stream())
        _keep_for(gathered, self._pages)
        with torch.cuda.stream(self._pages):
            for at, first, count in page_runs(copies.host_pages):
                host[first : first + count].copy_(gathered[at : at + count], non_blocking=True)

    def page_in(self, cache: Tensor, host: Tensor, copies: PageCopies) -> None:
        with torch.cuda.stream(self._pages):
            gathered = cache.new_empty(len(copies), *cache.shape[1:])
            for at, first, count in page_runs(copies.host_pages):
                gathered[at : at + count].copy_(host[first : first + count], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._pages)
        _keep_for(gathered, torch.cuda.current_stream())
        cache.index_copy_(0, _cache_pages(copies, cache.device), gathered)


def page_runs(host_pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Split distinct pages, sorted, into runs without a gap: (place of the run's first page, that page, pages)."""
    runs: list[tuple[int, int, int]] = []
    for at, page in enumerate(sorted(host_pages)):
        if runs and page == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((at, page, 1))
    return runs


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _keep_for(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Let a tensor's memory serve nobody else before `stream` is done with what it has been asked to so far."""
    tensor.record_stream(stream)


def _cache_pages(copies: PageCopies, device: torch.device) -> Tensor:
    """Give the pages of the cache in the order of those of the host."""
    order = np.argsort(copies.host_pages)
    return to_device(np.array(copies.cache_pages, dtype=np.int64)[order], device)
