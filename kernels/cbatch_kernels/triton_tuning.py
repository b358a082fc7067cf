"""Times kernels over a few configurations for one model on one card; nothing where that was done before.

Called once, when a model was loaded on a CUDA device, before memory is shared out and anything is captured. A prompt
step and a decode step of made-up sequences are timed, so the choice does not depend on which rows come first, and the
kernels over rows are too. Never under the interpreter, whose times mean nothing. Leaves out the choices themselves
(`triton_tiles`), and the kernel that joins spans, whose programs have next to nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial

import numpy as np
import torch
import triton
from torch import Tensor

from cbatch_kernels.draw_tokens import DrawRules
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.triton_attention import paged_attention_triton
from cbatch_kernels.triton_launch import is_interpreted
from cbatch_kernels.triton_rows import activate_and_multiply_triton, rms_norm_triton, rope_cache_write_triton
from cbatch_kernels.triton_sampling import draw_tokens_triton
from cbatch_kernels.triton_tiles import (
    ANY_WIDTH,
    Tiles,
    candidates,
    choices_of,
    row_candidates,
    row_choice,
    row_key,
    tiles_for,
    tiles_key,
)
from cbatch_kernels.tuned_choices import ModelSizes, TunedChoices, Values

PAGE_SIZE = 16
# Rows, query tokens and context of each: four prompts of which half is cached, and many long decodes.
STEPS = {"prompt": (4, 512, 1024), "single": (128, 1, 1024)}
ROWS = 128  # of a step that decodes
DRAWN = 65536  # logits of a row
EPS = 1e-5
WARM_UP_MS = 5
REPEAT_MS = 20

Clock = Callable[[Callable[[], object]], float]
Run = Callable[[Values], object]  # a launch in a configuration
RowStep = tuple[str, int, Callable[[], Run]]  # op, width of its rows, and what makes its tensors


def tune(device: torch.device, dtype: torch.dtype, sizes: ModelSizes) -> None:
    """Time what was not timed before on the device, and have it used from now on."""
    if is_interpreted():
        return
    choices = choices_of(device)
    tune_tiles(choices, device, dtype, sizes.heads, _on_device)
    tune_rows(choices, dtype, row_steps(device, dtype, sizes), _on_device)
    tiles_for.cache_clear()
    row_choice.cache_clear()
    torch.cuda.empty_cache()  # what the steps took is not the process's to keep


def tune_tiles(
    choices: TunedChoices, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], clock: Clock
) -> None:
    """Choose the tiles for (heads, KV heads, head_dim), those of prompts and those of single tokens by themselves."""
    for kind, step in STEPS.items():
        found = [astuple(tiles) for tiles in candidates(dtype, shape[2], single=kind == "single")]
        key = tiles_key(kind, dtype, *shape)
        if len(found) > 1 and choices.get(key) not in found:
            choices.choose(key, found, partial(_attend, _made_up_step(device, dtype, shape, step)), clock)


def tune_rows(choices: TunedChoices, dtype: torch.dtype, steps: Iterator[RowStep], clock: Clock) -> None:
    """Choose how kernels over rows walk them, for rows of each width."""
    for op, width, make in steps:
        key, found = row_key(op, dtype, width), row_candidates(op, width)
        if choices.get(key) not in found:
            choices.choose(key, found, make(), clock)


def row_steps(device: torch.device, dtype: torch.dtype, sizes: ModelSizes) -> Iterator[RowStep]:
    """Give what a step does to rows, on random numbers: the norms of tokens and of heads, and what else there is."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def norm(*shape: int) -> Run:
        weight = torch.ones(shape[-1], device=device)
        return partial(rms_norm_triton, drawn(*shape), weight, EPS, None)

    def gate() -> Run:
        return partial(activate_and_multiply_triton, drawn(2 * sizes.intermediate), "silu")

    def write() -> Run:
        query, key, angles = (drawn(n, sizes.head_dim) for n in (sizes.num_heads, sizes.num_kv_heads, 1))
        pages = key.new_zeros(ROWS // PAGE_SIZE, sizes.num_kv_heads, PAGE_SIZE, sizes.head_dim)
        slots = torch.arange(ROWS, device=device)
        cos = sin = angles[:, 0]
        return partial(rope_cache_write_triton, query, key, key, cos, sin, pages, pages.clone(), slots)

    def draw() -> Run:
        rules = DrawRules(
            temperature=np.ones(ROWS, dtype=np.float32),
            top_p=np.full(ROWS, 0.9, dtype=np.float32),
            top_k=np.full(ROWS, 50),
            min_p=np.zeros(ROWS, dtype=np.float32),
            uniform=np.full(ROWS, 0.5),
        )
        return partial(draw_tokens_triton, drawn(DRAWN), rules)

    yield "rms_norm", sizes.hidden, partial(norm, sizes.hidden)
    yield "rms_norm", sizes.head_dim, partial(norm, sizes.num_heads, sizes.head_dim)
    yield "activate_and_multiply", sizes.intermediate, gate
    yield "rope_cache_write", sizes.head_dim, write
    yield "draw_tokens", ANY_WIDTH, draw


def _attend(step: Callable[..., Tensor], values: Values) -> Tensor:
    return step(tiles=Tiles(*values))


def _made_up_step(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], step: tuple[int, int, int]
) -> Callable[..., Tensor]:
    """Give a call that attends over a cache whose pages lie in any order."""
    heads, kv_heads, head_dim = shape
    rows, query_len, context = step
    width = context // PAGE_SIZE
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(rows * width, generator=generator).view(rows, width).to(device, torch.int32)
    pages = torch.zeros(2, rows * width, kv_heads, PAGE_SIZE, head_dim, dtype=dtype, device=device)
    query_lens, context_lens = (np.full(rows, length, dtype=np.int32) for length in (query_len, context))
    query = torch.zeros(rows * query_len, heads, head_dim, dtype=dtype, device=device)
    metadata = PagedMetadata.build(query_lens, context_lens, tables)
    return partial(paged_attention_triton, query, pages[0], pages[1], metadata, scaling=head_dim**-0.5)


def _on_device(call: Callable[[], object]) -> float:
    """Give the median milliseconds of a call on the device."""
    return float(triton.testing.do_bench(call, warmup=WARM_UP_MS, rep=REPEAT_MS, return_mode="median"))
