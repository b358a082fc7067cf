"""The attention function that the engine registers with transformers, and what it is told each step.

Every attention layer of a model calls `paged_attention_forward`; the engine passes one `PagedStep` as the keyword
`paged` to the model's forward, and transformers hands it on. Nothing is global, nothing is set on modules. No mask
function is registered beside it, which is how transformers is told to build no mask. Leaves out who owns the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cbatch_kernels import dispatch
from cbatch_kernels.attention_libraries import Attend
from cbatch_kernels.metadata import PagedMetadata
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cbatch.errors import UnsupportedModelError

ATTENTION_NAME = "cbatch"
FULL_ATTENTION = "full_attention"  # the types of layers, as in transformers' `layer_types`
SLIDING_ATTENTION = "sliding_attention"


def name_layer_type(sliding_window: int | None) -> str:
    """Name the type of a layer by its window in tokens, None for the whole context: what `PagedStep` knows it by."""
    return FULL_ATTENTION if sliding_window is None else f"{SLIDING_ATTENTION}, {sliding_window} tokens"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step's batch as the layers of one attention type see it."""

    slot_mapping: Tensor  # int64 [T]: where the step's tokens are written, page * page_size + offset
    metadata: PagedMetadata


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the layers need to know of one step; the sequences are indexed by layer."""

    key_pages: Sequence[Tensor]  # [num_pages, kv_heads, page_size, head_dim], written in place
    value_pages: Sequence[Tensor]  # as key_pages
    layer_types: Sequence[str]  # by `name_layer_type`: the keys of `inputs`
    inputs: Mapping[str, AttentionInputs]
    row_multiple: int | None = None  # where results may not depend on the batch: what rows are padded to
    attend: Attend | None = None  # a library's attention in the place of ours
    wanted: Tensor | None = None  # int64: the tokens that get logits, where the others need not be finished


def register_attention() -> None:
    """Make `attn_implementation="cbatch"` known to transformers; any number of times."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Write a step's keys and values to the layer's pages and attend over them.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] → [1, T, heads, head_dim].
    Raises UnsupportedModelError where the model wants something else than causal attention within its window.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    assert query.shape[0] == 1
    if attention_mask is not None:
        raise _unsupported(module, "builds its own attention mask")
    cached = paged.key_pages[layer].shape[1::2]
    if not key.shape[1::2] == value.shape[1::2] == cached:  # kernels would write beyond the pages
        raise _unsupported(module, "has other keys and values than its config states")
    attended = attend_paged(
        module,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        paged,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attended[None], None


def attend_paged(
    module: nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paged: PagedStep,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write a step's keys and values to a layer's pages and attend over them: [T, heads, head_dim].

    query [T, heads, head_dim], key and value [T, kv_heads, head_dim], any strides but a dense last dimension. With
    `angles`, cos and sin [T, rotary_dim], queries and keys are rotated before, in place.
    """
    inputs = inputs_of_layer(module, layer, paged, sliding_window)
    key_pages, value_pages = paged.key_pages[layer], paged.value_pages[layer]
    if angles is None:
        dispatch.cache_write(key, value, key_pages, value_pages, inputs.slot_mapping)
    else:
        dispatch.rope_cache_write(query, key, value, *angles, key_pages, value_pages, inputs.slot_mapping)
    attend = paged.attend or partial(dispatch.paged_attention, row_multiple=paged.row_multiple)
    return attend(
        query,
        key_pages,
        value_pages,
        inputs.metadata,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


def inputs_of_layer(module: nn.Module, layer: int, paged: PagedStep, sliding_window: int | None) -> AttentionInputs:
    """Give the batch as a layer sees it, whose module attends within `sliding_window`.

    Raises UnsupportedModelError where the module wants something else than causal attention within its layer's window.
    """
    layer_type = paged.layer_types[layer]
    if getattr(module, "is_causal", True) is False:
        raise _unsupported(module, "attends in both directions")
    if sliding_window is None and layer_type != FULL_ATTENTION:
        raise _unsupported(module, "ignores the sliding window that its config states")
    return paged.inputs[layer_type]


def _unsupported(module: nn.Module, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__} {what}", hint="this architecture cannot be run")
