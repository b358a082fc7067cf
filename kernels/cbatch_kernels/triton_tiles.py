"""How much of a batch kernels work on at a time, by device: a fixed table, and what was timed on a card.

`tiles_for` is asked by `triton_attention` for every layer, `row_choice` for every launch of a kernel over rows.
Candidates are what `triton_tuning` times.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import triton

from cbatch_kernels import triton_kernels
from cbatch_kernels.compile import cache_folder
from cbatch_kernels.tuned_choices import TunedChoices, Values, fingerprint

Choice = TypeVar("Choice")

MIN_DOT = 16  # the least that tensor cores multiply


@dataclass(frozen=True, slots=True)
class Tiles:
    """As much as fits the registers for heads of a size."""

    prompt_rows: int  # query tokens of a prompt, or of rows that share a prefix, times query heads of a KV head
    prompt_keys: int
    prompt_warps: int
    single_keys: int  # for sequences of one query token
    single_warps: int = 8
    prompt_stages: int = 3  # blocks of keys that are on their way at once
    single_stages: int = 3


# By the largest head that they are for. In float32 no tensor core multiplies, and operands fill the registers.
TILES = {64: Tiles(64, 64, 8, 64), 128: Tiles(128, 32, 8, 64), 256: Tiles(32, 16, 4, 16)}
FLOAT32_TILES = {256: Tiles(32, 16, 8, 16)}
# (rows, keys, warps, stages) for prompts and (keys, warps, stages) for single tokens beside the fixed ones, in 16 bits,
# by the largest head that they are for: what spills on no card.
PROMPT_CANDIDATES = {
    64: ((64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3)),
    128: ((64, 32, 8, 3), (64, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3)),
    256: ((32, 32, 4, 2), (64, 16, 8, 3), (32, 32, 8, 3)),
}
SINGLE_CANDIDATES = {
    64: ((32, 4, 3), (64, 4, 3), (64, 4, 2), (128, 8, 2)),
    128: ((32, 4, 3), (64, 4, 3), (64, 4, 2)),
    256: ((32, 4, 3), (64, 4, 3), (32, 8, 3)),
}
# Of kernels over rows: elements at a time and warps, or warps where a program takes all of a row; the fixed ones first.
ROW_CANDIDATES: dict[str, tuple[Values, ...]] = {
    "draw_tokens": ((1024, 8), (512, 4), (512, 8), (1024, 16)),
    "activate_and_multiply": ((1024, 4), (256, 2), (512, 4), (1024, 8), (2048, 8)),
    "rms_norm": ((4,), (1,), (2,), (8,), (16,)),
    "rope_cache_write": ((4,), (1,), (2,)),
}
ANY_WIDTH = 0  # of rows that are so long that their length makes no difference
WARP_ELEMENTS = 32 * 64  # of a row that a warp holds in registers, and has some left


def fixed_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """Give what works on any card."""
    return _by_head(FLOAT32_TILES if dtype == torch.float32 else TILES, head_dim)


def candidates(dtype: torch.dtype, head_dim: int, *, single: bool) -> list[Tiles]:
    """Give what is worth timing for prompts, or for single tokens; the fixed ones first."""
    fixed = fixed_tiles(dtype, head_dim)
    if dtype == torch.float32:
        return [fixed]
    if single:
        others = (
            replace(fixed, single_keys=keys, single_warps=warps, single_stages=stages)
            for keys, warps, stages in _by_head(SINGLE_CANDIDATES, head_dim)
        )
    else:
        others = (
            replace(fixed, prompt_rows=rows, prompt_keys=keys, prompt_warps=warps, prompt_stages=stages)
            for rows, keys, warps, stages in _by_head(PROMPT_CANDIDATES, head_dim)
        )
    return list(dict.fromkeys([fixed, *others]))


def _by_head(by_size: dict[int, Choice], head_dim: int) -> Choice:
    """Give what is for the smallest size that holds the heads."""
    return next(choice for size, choice in by_size.items() if head_dim <= size)


@cache
def tiles_for(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Tiles:
    """Give the tiles that were fastest on the device for a model's heads; the fixed ones where nothing was timed."""
    fixed = fixed_tiles(dtype, head_dim)
    if device.type != "cuda":
        return fixed
    prompt, single = (
        choices_of(device).get(tiles_key(kind, dtype, heads, kv_heads, head_dim)) for kind in ("prompt", "single")
    )
    best_prompt = fixed if prompt is None else Tiles(*prompt)
    best_single = fixed if single is None else Tiles(*single)
    return replace(
        best_prompt,
        single_keys=best_single.single_keys,
        single_warps=best_single.single_warps,
        single_stages=best_single.single_stages,
    )


def tiles_key(kind: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str:
    """Name what tiles are timed for; the number of fields is part of it, since a choice is all of them."""
    return f"{kind} {dtype} {heads}/{kv_heads} heads of {head_dim}, {len(astuple(Tiles(0, 0, 0, 0)))} numbers"


def row_candidates(op: str, width: int) -> list[Values]:
    """Give what is worth timing for rows of a width; the fixed ones first, which work anywhere."""
    fixed, *others = ROW_CANDIDATES[op]
    return [fixed, *(values for values in others if len(values) > 1 or width <= values[-1] * WARP_ELEMENTS)]


@cache
def row_choice(op: str, device: torch.device, dtype: torch.dtype, width: int) -> Values:
    """Give what was fastest on the device for rows of a width; the fixed ones where nothing was timed."""
    chosen = choices_of(device).get(row_key(op, dtype, width)) if device.type == "cuda" else None
    return ROW_CANDIDATES[op][0] if chosen is None else chosen


def row_key(op: str, dtype: torch.dtype, width: int) -> str:
    """Name what a kernel over rows is timed for."""
    return f"{op} {dtype} {width}"


def choices_of(device: torch.device) -> TunedChoices:
    """Give the choices for a device, whichever way it is spelled: its card's."""
    return choices_for_card(torch.cuda.get_device_name(device))


@cache
def choices_for_card(card: str) -> TunedChoices:
    """Open the choices for a card: its name, the kernels' text and Triton's version name the file."""
    folder = cache_folder()
    sources = Path(triton_kernels.__file__).parent.glob("*.py")
    name = fingerprint(sources, card, triton.__version__)
    return TunedChoices(None if folder is None else folder / f"triton-choices-{name}.json")
