"""Times an op against its reference, after its tests: `python kernels/bench.py OP [--dtype ...]`; refuses on red.

For whoever works on a kernel. Speeds of one machine at one time: compare only what one call prints.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.cache_write import cache_write_ref
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.paged_attention import paged_attention_ref

TESTS = Path(__file__).resolve().parent.parent / "tests" / "kernels"
WARM_UP = 3
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch to time: one layer of `rows` sequences with `query` new tokens each."""

    rows: int
    query: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Timed:
    """What is dispatched, its reference, and the bytes that either has to move at least."""

    dispatched: Callable[[], object]
    reference: Callable[[], object]
    num_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=sorted(OPS))
    for name, default in (("rows", 32), ("query", 1), ("context", 256), ("heads", 9), ("kv-heads", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args())
    op = given.pop("op")
    run_tests(op)
    sizes = Sizes(**{**given, "dtype": getattr(torch, given["dtype"]), "device": torch.device(given["device"])})
    timed = OPS[op](sizes)
    ours, reference = measure(timed, sizes.device)
    rate = timed.num_bytes / ours / 1e9
    sys.stdout.write(
        f"{op}, {dispatch.describe_kernels(sizes.device)}: {ours * 1e3:.3f} ms, {rate:.1f} GB/s; "
        f"reference {reference * 1e3:.3f} ms, ratio {reference / ours:.2f}\n"
    )


def run_tests(op: str) -> None:
    """End the program where the op's tests fail: the speed of a wrong answer is of no interest."""
    command = [sys.executable, "-m", "pytest", "-q", str(TESTS / f"test_{op}.py")]
    if subprocess.run(command, cwd=TESTS.parent.parent, check=False).returncode != 0:
        sys.exit(f"the tests of {op} fail: nothing is timed")


def measure(timed: Timed, device: torch.device) -> tuple[float, float]:
    """Give the median seconds of both, measured alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(WARM_UP + REPEATS):
        for taken, call in zip(times, (timed.dispatched, timed.reference), strict=True):
            _synchronize(device)
            began = time.perf_counter()
            call()
            _synchronize(device)
            if repeat >= WARM_UP:
                taken.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pools(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Build key pages, value pages and the rows' tables, scattered as after a while of running."""
    width = -(-sizes.context // sizes.page_size)
    num_pages = sizes.rows * width
    shape = (2, num_pages, sizes.kv_heads, sizes.page_size, sizes.head_dim)
    pools = torch.randn(shape, dtype=sizes.dtype, device=sizes.device)
    tables = torch.randperm(num_pages, device=sizes.device).view(sizes.rows, width).to(torch.int32)
    return pools[0], pools[1], tables


def _paged_attention(sizes: Sizes) -> Timed:
    keys, values, tables = _pools(sizes)
    metadata = PagedMetadata.build(
        np.full(sizes.rows, sizes.query, dtype=np.int32), np.full(sizes.rows, sizes.context, dtype=np.int32), tables
    )
    shape = (sizes.rows * sizes.query, sizes.heads, sizes.head_dim)
    query = torch.randn(shape, dtype=sizes.dtype, device=sizes.device)
    scaling = sizes.head_dim**-0.5
    kv_tokens = 2 * sizes.rows * sizes.context * sizes.kv_heads
    return Timed(
        lambda: dispatch.paged_attention(query, keys, values, metadata, scaling=scaling),
        lambda: paged_attention_ref(query, keys, values, metadata, scaling=scaling),
        (kv_tokens * sizes.head_dim + 2 * query.numel()) * sizes.dtype.itemsize,
    )


def _cache_write(sizes: Sizes) -> Timed:
    keys, values, _ = _pools(sizes)
    num_tokens = sizes.rows * sizes.query
    shape = (2, num_tokens, sizes.kv_heads, sizes.head_dim)
    key, value = torch.randn(shape, dtype=sizes.dtype, device=sizes.device)
    slots = torch.randperm(sizes.rows * sizes.context, device=sizes.device)[:num_tokens]
    return Timed(
        lambda: dispatch.cache_write(key, value, keys, values, slots),
        lambda: cache_write_ref(key, value, keys, values, slots),
        4 * key.numel() * sizes.dtype.itemsize,
    )


OPS: dict[str, Callable[[Sizes], Timed]] = {"paged_attention": _paged_attention, "cache_write": _cache_write}

if __name__ == "__main__":
    main()
