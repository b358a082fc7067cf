"""The registered attention function against transformers' own forward, for every family, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.metadata import PagedMetadata
from transformers import PreTrainedModel

from cbatch.errors import UnsupportedModelError
from cbatch.models.attention import (
    ATTENTION_NAME,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionInputs,
    PagedStep,
    paged_attention_forward,
    register_attention,
)
from cbatch.models.inspect import describe_model
from cbatch.models.source import ModelSource
from tests.tiny_models import CONTEXT, FAMILIES, WINDOW, build_tiny_model

PAGE_SIZE = 4
PROMPT_LENS = (25, 6, 18)  # two of them beyond the window
NUM_DECODED = 4
BLOCKS_PER_ROW = 8


class PlainCache:
    """Pages full of NaN, scattered tables, and one forward pass over any slices of the rows."""

    def __init__(self, model: PreTrainedModel, num_rows: int) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        num_pages = num_rows * BLOCKS_PER_ROW + 1
        shape = (2, config.num_hidden_layers, num_pages, kv_heads, PAGE_SIZE, head_dim)
        self.pages = torch.full(shape, float("nan"))
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order.view(num_rows, BLOCKS_PER_ROW).to(torch.int32)
        self.model = model

    def forward(self, pieces: list[tuple[int, list[int], int]]) -> list[torch.Tensor]:
        """Run (row, token ids, position of the first) pieces as one batch; logits [len, vocab] of each."""
        pieces = sorted(pieces, key=lambda piece: len(piece[1]) > 1)
        query_lens = np.array([len(ids) for _, ids, _ in pieces], dtype=np.int32)
        positions = [np.arange(start, start + len(ids)) for _, ids, start in pieces]
        slots = [
            self.tables[row][at // PAGE_SIZE].numpy().astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
            for (row, _, _), at in zip(pieces, positions, strict=True)
        ]
        context_lens = np.array([at[-1] + 1 for at in positions], dtype=np.int32)
        metadata = PagedMetadata.build(query_lens, context_lens, self.tables[[row for row, _, _ in pieces]])
        inputs = AttentionInputs(torch.from_numpy(np.concatenate(slots)), metadata)
        shape = describe_model(self.model.config, ModelSource("tiny"))
        by_type = dict.fromkeys(shape.layer_types, inputs)  # one table serves all: nothing is recycled here
        step = PagedStep(self.pages[0].unbind(), self.pages[1].unbind(), shape.layer_types, by_type)
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor([[token for _, ids, _ in pieces for token in ids]]),
                position_ids=torch.from_numpy(np.concatenate(positions))[None],
                use_cache=False,
                paged=step,
            ).logits[0]
        split = torch.split(logits, query_lens.tolist())
        by_row = sorted(zip(pieces, split, strict=True), key=lambda pair: pair[0][0])
        return [piece_logits for _, piece_logits in by_row]


def cut(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_its_eager_forward_whole_chunked_and_decoding(family: str) -> None:
    check_against_eager(build_tiny_model(family), chunk_sizes=(max(PROMPT_LENS), PAGE_SIZE - 1, 1))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"scale_attn_weights": False}),
        ("gemma2", {"query_pre_attn_scalar": 3}),
        ("granite", {"attention_multiplier": 0.7}),
        ("mistral_window", {"sliding_window": 8}),
        ("gpt_oss", {"sliding_window": 1}),
    ],
)
def test_scaling_and_windows_that_are_not_the_default_reach_the_pages(family: str, changes: dict[str, object]) -> None:
    check_against_eager(build_tiny_model(family, **changes), chunk_sizes=(max(PROMPT_LENS), 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_states_the_windows_that_the_layers_use(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(family)
    used: list[int | None] = []

    def record(query: torch.Tensor, *_: object, sliding_window: int | None, **__: object) -> torch.Tensor:
        used.append(sliding_window)
        return torch.zeros_like(query)

    monkeypatch.setattr(dispatch, "paged_attention", record)
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    PlainCache(model, 1).forward([(0, [5, 6, 7], 0)])
    assert tuple(used) == describe_model(model.config, ModelSource("tiny")).sliding_windows


def test_the_windowed_families_really_leave_their_window() -> None:
    """Guards the tests above: without the window these models give other logits."""
    ids = torch.randint(5, 280, (1, 2 * WINDOW + 3), generator=torch.Generator().manual_seed(1))
    for family in ("mistral_window", "gemma2", "gemma3", "gpt_oss", "cohere2", "olmo3"):
        windowed = build_tiny_model(family)
        model_without = build_tiny_model(family, sliding_window=CONTEXT)
        difference = (windowed(ids).logits[0, -1] - model_without(ids).logits[0, -1]).abs().max()
        assert difference > 1e-2, family


def check_against_eager(model: PreTrainedModel, chunk_sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 280, (length + NUM_DECODED,), generator=generator).tolist() for length in PROMPT_LENS]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in rows]
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    for size in chunk_sizes:
        found = run_in_chunks(model, rows, size)
        for row in range(len(rows)):
            scale = max(1.0, float(expected[row].abs().max()))
            torch.testing.assert_close(found[row] / scale, expected[row] / scale, atol=3e-5, rtol=0)


def run_in_chunks(model: PreTrainedModel, rows: list[list[int]], size: int) -> list[torch.Tensor]:
    """Prefill all rows together, `size` tokens of each a step, then decode token by token, mixed where they differ."""
    cache = PlainCache(model, len(rows))
    plans = []
    for ids, prompt_len in zip(rows, PROMPT_LENS, strict=True):
        plans.append([*cut(prompt_len, size), *((at, at + 1) for at in range(prompt_len, len(ids)))])
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in range(max(map(len, plans))):
        active = [row for row, plan in enumerate(plans) if step < len(plan)]
        pieces = [(row, rows[row][slice(*plans[row][step])], plans[row][step][0]) for row in active]
        for row, piece_logits in zip(active, cache.forward(pieces), strict=True):
            logits[row].append(piece_logits)
    return [torch.cat(parts) for parts in logits]


def test_a_model_that_brings_its_own_mask_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its own attention mask"):
        call_with(FULL_ATTENTION, attention_mask=torch.zeros(1, 1, 1, 1))


def test_a_model_that_attends_in_both_directions_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="both directions"):
        call_with(FULL_ATTENTION, is_causal=False)


def test_a_model_that_ignores_the_window_of_its_config_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        call_with(SLIDING_ATTENTION)


@pytest.mark.parametrize(("key", "value"), [((2, 8), (2, 8)), ((1, 8), (1, 4)), ((1, 16), (1, 8))])
def test_keys_and_values_that_the_pages_do_not_fit_are_refused(key: tuple[int, int], value: tuple[int, int]) -> None:
    """Kernels would write beyond the pages, into whatever lies there."""
    with pytest.raises(UnsupportedModelError, match="other keys and values than its config states"):
        call_with(FULL_ATTENTION, key=key, value=value)


def call_with(
    layer_type: str,
    *,
    attention_mask: torch.Tensor | None = None,
    is_causal: bool = True,
    key: tuple[int, int] = (1, 8),
    value: tuple[int, int] = (1, 8),
) -> None:
    """Attend as a layer with pages for one head of 8; `key` and `value` are the numbers of heads, and their size."""
    module = torch.nn.Module()
    module.layer_idx, module.is_causal = 0, is_causal
    query, keys, values = (torch.zeros(1, heads, 1, size) for heads, size in ((1, 8), key, value))
    pages = [torch.zeros(1, 1, 1, 8)]
    paged = PagedStep(pages, pages, [layer_type], {})
    paged_attention_forward(module, query, keys, values, attention_mask, paged=paged)
