"""Compiles the kernels for a card that is not there, and reads what they take of it. A program, since the interpreter
that the tests run them in must be off: python -m tests.kernels.ahead_of_time ARCHITECTURE

Prints one JSON object for each compiled kernel: name, registers, bytes of stack (what does not fit the registers) and
of shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import triton
from cbatch_kernels import triton_attention, triton_rows, triton_sampling
from cbatch_kernels.linear import Activation
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.shared_prefix import SharedPrefixes
from cbatch_kernels.triton_tiles import Tiles, candidates, row_candidates
from cbatch_kernels.triton_tuning import row_steps
from cbatch_kernels.tuned_choices import ModelSizes
from torch import Tensor
from triton.backends.compiler import GPUTarget

WARP_SIZE = 32
PROCESSORS = 132
WIDEST = ModelSizes(64, 8, 128, hidden=8192, intermediate=28672)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# heads, KV heads, head_dim, window, soft-cap, sinks: as in Llama, Mistral, SmolLM2, GPT-OSS, Gemma 2
MODELS = (
    (32, 8, 128, None, None, False),
    (32, 8, 128, 4096, None, False),
    (9, 3, 64, None, None, False),
    (64, 8, 64, 128, None, True),
    (8, 4, 256, None, 50.0, False),
)
BATCHES = ((3, 1, 9000), (300, 1, 300), (2, 500, 700))  # rows, query tokens and context of each


class AbsentCard:
    """The part of Triton's driver that compiling asks."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def main(architecture: int) -> None:
    triton.runtime.driver.set_active(AbsentCard(architecture))
    name = ""

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        found = {
            "name": f"{kernel.fn.__name__}, {name}",
            "shared": compiled.metadata.shared,
            **usage(compiled.asm["cubin"]),
        }
        print(json.dumps(found), flush=True)

    triton_attention.launch = triton_rows.launch = triton_sampling.launch = launch
    triton_attention.count_processors = lambda _: PROCESSORS
    for name, call in calls():  # noqa: B007  # `launch` reads it
        call()


def usage(cubin: bytes) -> dict[str, int]:
    """Read registers and stack off a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Give every op at sizes of common models, on tensors without memory."""
    for model in MODELS:
        for batch in BATCHES:
            yield f"{model} over {batch}", partial(attend, torch.bfloat16, model, batch)
        if model[3] is None:
            yield f"{model} over a shared prefix", partial(attend, torch.bfloat16, model, BATCHES[1], shares=True)
    for head_dim in (64, 128, 256):
        for single in (True, False):
            for tiles in candidates(torch.bfloat16, head_dim, single=single)[1:]:
                model = (8, 4, head_dim, None, None, False)
                yield f"{tiles}", partial(attend, torch.bfloat16, model, BATCHES[1 if single else 2], tiles=tiles)
    yield "float32 over a shared prefix", partial(attend, torch.float32, MODELS[0], BATCHES[1], shares=True)
    yield "float32", partial(attend, torch.float32, MODELS[0], BATCHES[2])
    yield "float16", partial(attend, torch.float16, MODELS[0], BATCHES[2])
    for dtype in DTYPES:
        for op, width, make in row_steps(torch.device("meta"), dtype, WIDEST):
            for choice in row_candidates(op, width)[: None if dtype == torch.bfloat16 else 1]:
                yield f"{dtype} {width} {choice}", partial(make(), choice)
        yield f"{dtype}", partial(write, dtype)
        x, weight = empty(64, WIDEST.hidden, dtype=dtype), empty(WIDEST.hidden, dtype=torch.float32)
        yield f"{dtype} beside a residual", partial(triton_rows.rms_norm_triton, x, weight, 1e-5, x)
    for activation in get_args(Activation):
        x = empty(64, 28672, dtype=torch.bfloat16)
        yield activation, partial(triton_rows.activate_and_multiply_triton, x, activation)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attend(
    dtype: torch.dtype,
    model: tuple[Any, ...],
    batch: tuple[int, int, int],
    *,
    shares: bool = False,
    tiles: Tiles | None = None,
) -> None:
    heads, kv_heads, head_dim, window, softcap, has_sinks = model
    rows, query_len, context = batch
    pages = empty(9999, kv_heads, 16, head_dim, dtype=dtype)
    lens = [np.full(rows, length, dtype=np.int32) for length in (query_len, context)]
    prefixes = SharedPrefixes.allocate(rows, torch.device("meta")) if shares else None
    metadata = PagedMetadata.build(*lens, empty(rows, 1024, dtype=torch.int32), prefixes=prefixes)
    triton_attention.paged_attention_triton(
        empty(rows * query_len, heads, head_dim, dtype=dtype),
        pages,
        pages,
        metadata,
        scaling=0.1,
        sliding_window=window,
        softcap=softcap,
        sinks=empty(heads, dtype=dtype) if has_sinks else None,
        tiles=tiles,
    )


def write(dtype: torch.dtype) -> None:
    key, pages = empty(64, 8, 128, dtype=dtype), empty(9999, 8, 16, 128, dtype=dtype)
    triton_rows.cache_write_triton(key, key, pages, pages, empty(64, dtype=torch.int64))


if __name__ == "__main__":
    main(int(sys.argv[1]))
