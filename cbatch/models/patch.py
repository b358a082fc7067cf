"""Swaps a loaded model's modules for fused ones, family by family, by an explicit table.

Called by load. A family that is not in the table runs as transformers has it. After the swap the model must give the
logits that it gave before, on a random batch, or the patch is refused. Leaves out what the fused modules compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from cbatch_kernels.linear import Activation
from cbatch_kernels.metadata import PagedMetadata
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbatch.errors import EngineError
from cbatch.models.attention import AttentionInputs, PagedStep, name_layer_type
from cbatch.models.fused import FusedAttention, FusedLayer, FusedLinear, FusedMLP, FusedRMSNorm, LayerNorms
from cbatch.models.fused_decoder import fuse_decoder
from cbatch.models.inspect import ModelShape
from cbatch.models.memory import trim_heap
from cbatch.models.projections import CompiledProjections, Projections, choose_projections
from cbatch.units import ceil_div

logger = logging.getLogger(__name__)

CHECKED_TOKENS = 24  # of the self-check's batch: one page and a half
CHECKED_PAGE_SIZE = 16
# Share of the logits' spread by which they may differ: rounding, of sums in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


PRE_NORM = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORM = LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
BOTH_NORMS = replace(POST_NORM, before_attention="input_layernorm", before_mlp="pre_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Swaps:
    """Which classes of a family are swapped; where weights are packed, every other linear layer is, where it stands."""

    norms: Mapping[str, float] = field(default_factory=dict)  # class → what it adds to its stored weight
    attention: str | None = None
    mlp: str | None = None
    layer: str | None = None  # of which nothing but these is in the way of its residuals:
    layer_norms: LayerNorms = PRE_NORM


def _whole(prefix: str, layer_norms: LayerNorms = PRE_NORM, offset: float = 0.0) -> Swaps:
    """Swap all of a family's layers, built as Llama's are or with other norms."""
    names = (f"{prefix}Attention", f"{prefix}MLP", f"{prefix}DecoderLayer")
    return Swaps({f"{prefix}RMSNorm": offset}, *names, layer_norms)


FAMILIES: dict[str, Swaps] = {
    "llama": _whole("Llama"),
    "mistral": _whole("Mistral"),
    "qwen2": _whole("Qwen2"),
    "qwen3": _whole("Qwen3"),
    "smollm3": _whole("SmolLM3"),
    "phi3": _whole("Phi3"),
    "granite": Swaps({"GraniteRMSNorm": 0.0}, "GraniteAttention", "GraniteMLP"),
    "olmo2": _whole("Olmo2", POST_NORM),
    "olmo3": _whole("Olmo3", POST_NORM),
    "gemma2": _whole("Gemma2", BOTH_NORMS, offset=1.0),
    "gemma3_text": _whole("Gemma3", BOTH_NORMS, offset=1.0),
    "mixtral": Swaps({"MixtralRMSNorm": 0.0}, "MixtralAttention"),
    "qwen3_moe": Swaps({"Qwen3MoeRMSNorm": 0.0}, "Qwen3MoeAttention"),
    "gpt_oss": Swaps({"GptOssRMSNorm": 0.0}),
    "cohere2": Swaps(mlp="Cohere2MLP"),
    "gpt_neox": Swaps(),
    "opt": Swaps(),
}


class PatchDiffersError(EngineError):
    """The patched model computes something else than the model that was loaded."""


def patch_refusal(model_type: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why a model cannot be patched; None where it can."""
    if model_type not in FAMILIES:
        return f"{model_type} is not in the table of patches"
    chosen = choose_projections(dtype, device)
    return chosen if isinstance(chosen, str) else None


def takes_one_call(model_type: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the layers of a family that can be patched become one module, as a rule."""
    swaps = FAMILIES[model_type]
    takes_layers = swaps.layer is not None and swaps.layer_norms == PRE_NORM
    return takes_layers and isinstance(choose_projections(dtype, device), CompiledProjections)


def head_copy_bytes(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> int:
    """Count the bytes of a head that is packed while the embedding, whose weight it shares, stays as it is."""
    if not shape.shares_embedding or not _packs_all(shape, dtype, device):
        return 0
    item = torch.bfloat16 if _halves(shape, dtype, device) else dtype
    return shape.vocab_size * shape.hidden_size * item.itemsize


def packed_bytes(loaded_bytes: int, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> int:
    """Count the bytes of a model's weights once it is patched, of how many they are as they are loaded."""
    patched = loaded_bytes
    if _packs_all(shape, dtype, device) and _halves(shape, dtype, device):
        embedding = shape.vocab_size * shape.hidden_size * dtype.itemsize
        patched -= (loaded_bytes - embedding) * (dtype.itemsize - torch.bfloat16.itemsize) // dtype.itemsize
    return patched + head_copy_bytes(shape, dtype, device)


def _packs_all(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> bool:
    projections = choose_projections(dtype, device)
    return shape.model_type in FAMILIES and not isinstance(projections, str) and projections.takes_all


def _halves(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether weights are kept in bfloat16, which loses nothing of what the checkpoint says."""
    return shape.checkpoint_dtype == "bfloat16" and isinstance(choose_projections(dtype, device), CompiledProjections)


@torch.inference_mode()
def patch_model(model: PreTrainedModel, shape: ModelShape, device: torch.device) -> None:
    """Swap the modules of a model in memory, in place, and check that it computes what it did.

    Raises PatchDiffersError: the model is of no use then and must be loaded again.
    """
    before = _logits(model, shape, device)
    swaps = FAMILIES[shape.model_type]
    projections = choose_projections(model.dtype, device)
    assert not isinstance(projections, str), projections
    _swap(model, swaps, projections, _activation(model))
    after = _logits(model, shape, device)
    spread = (before.max() - before.min()).item()
    difference = (after - before).abs().max().item()
    if not difference <= TOLERANCE[model.dtype] * spread:
        raise PatchDiffersError(f"the patched model's logits differ by {difference:.3g} of {spread:.3g}")
    logger.debug("patched logits differ by %.3g of %.3g", difference, spread)


def _swap(model: nn.Module, swaps: Swaps, projections: Projections, activation: Activation | None) -> None:
    """Swap inside out, so that each fused module takes over what is swapped within it."""
    for name, offset in swaps.norms.items():
        _replace(model, name, partial(FusedRMSNorm, offset=offset))
    if swaps.mlp is not None and activation is not None:
        _replace(model, swaps.mlp, partial(FusedMLP, projections=projections, activation=activation))
    if swaps.attention is not None:
        _replace(model, swaps.attention, partial(FusedAttention, projections=projections))
    if swaps.layer is not None and activation is not None:
        _replace(model, swaps.layer, partial(FusedLayer, norms=swaps.layer_norms))
    if projections.takes_all:
        _replace(model, "Linear", partial(FusedLinear, projections=projections))
    for parent in list(model.modules()):
        if isinstance(layers := getattr(parent, "layers", None), nn.ModuleList) and (whole := fuse_decoder(layers)):
            parent.layers = nn.ModuleList([whole])


def _replace(model: nn.Module, class_name: str, fuse: Callable[[Any], nn.Module]) -> None:
    """Put `fuse(module)` in the place of every module of a class; each original is let go at once."""
    parents = [m for m in model.modules() if any(type(child).__name__ == class_name for child in m.children())]
    for parent in parents:  # a list of all modules would hold on to those that are replaced
        for name, child in list(parent.named_children()):
            if type(child).__name__ == class_name:
                setattr(parent, name, fuse(child))
                del child
        trim_heap()  # else what one layer let go of is still there when the last one is packed


def _activation(model: PreTrainedModel) -> Activation | None:
    """Give what the model's MLPs put between their products, if it can be fused with them."""
    text = model.config.get_text_config(decoder=True)
    name = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    return name if name in get_args(Activation) else None


def _logits(model: PreTrainedModel, shape: ModelShape, device: torch.device) -> Tensor:
    """Run a prompt of random tokens over a cache of its own: [CHECKED_TOKENS, vocab], float32."""
    num_pages = ceil_div(CHECKED_TOKENS, CHECKED_PAGE_SIZE)
    pages = (shape.num_layers, num_pages, shape.num_kv_heads, CHECKED_PAGE_SIZE, shape.head_dim)
    keys = torch.zeros(pages, dtype=model.dtype, device=device)
    values = torch.zeros_like(keys)
    length = np.array([CHECKED_TOKENS], dtype=np.int32)
    table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    metadata = PagedMetadata.build(length, length, table)
    inputs = AttentionInputs(torch.arange(CHECKED_TOKENS, device=device), metadata)
    types = [name_layer_type(window) for window in shape.sliding_windows]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (1, CHECKED_TOKENS), generator=generator).to(device)
    output = model(
        input_ids=tokens,
        position_ids=torch.arange(CHECKED_TOKENS, device=device)[None],
        use_cache=False,
        paged=PagedStep(list(keys), list(values), types, dict.fromkeys(types, inputs)),
    )
    logits: Tensor = output.logits[0].float()
    return logits
