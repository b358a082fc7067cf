"""Times kernels over a few configurations for one model on one card; nothing where that was done before.

Called once, when a model was loaded on a CUDA device, before memory is shared out and anything is captured. A prompt
step and a decode step of made-up sequences are timed, so the choice does not depend on which rows come first, and so is
the drawing of tokens. Never under the interpreter, whose times mean nothing. Leaves out the choices themselves
(`triton_tiles`), and the other kernels, which wait for memory whatever their configuration is.
"""

from __future__ import annotations

from collections.abc import Callable
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
from cbatch_kernels.triton_sampling import draw_tokens_triton
from cbatch_kernels.triton_tiles import (
    DRAW_CANDIDATES,
    Tiles,
    candidates,
    choices_of,
    draw_block,
    draw_key,
    tiles_for,
    tiles_key,
)
from cbatch_kernels.tuned_choices import TunedChoices, Values

PAGE_SIZE = 16
# Rows, query tokens and context of each: four prompts of which half is cached, and many long decodes.
STEPS = {"prompt": (4, 512, 1024), "single": (128, 1, 1024)}
DRAWN = (128, 65536)  # rows and logits of each
WARM_UP_MS = 5
REPEAT_MS = 20

Clock = Callable[[Callable[[], object]], float]


def tune(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Time what was not timed before on the device, and have it used from now on."""
    if is_interpreted():
        return
    choices = choices_of(device)
    tune_tiles(choices, device, dtype, (heads, kv_heads, head_dim), _on_device)
    tune_drawing(choices, device, dtype, _on_device)
    tiles_for.cache_clear()
    draw_block.cache_clear()
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


def tune_drawing(choices: TunedChoices, device: torch.device, dtype: torch.dtype, clock: Clock) -> None:
    """Choose how the rows of a step are walked, where all are cut off by top-k and top-p."""
    if choices.get(draw_key(dtype)) in DRAW_CANDIDATES:
        return
    rows, vocab = DRAWN
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    rules = DrawRules(
        temperature=np.ones(rows, dtype=np.float32),
        top_p=np.full(rows, 0.9, dtype=np.float32),
        top_k=np.full(rows, 50),
        min_p=np.zeros(rows, dtype=np.float32),
        uniform=np.full(rows, 0.5),
    )
    choices.choose(draw_key(dtype), DRAW_CANDIDATES, partial(draw_tokens_triton, logits, rules), clock)


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
