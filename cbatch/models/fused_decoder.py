"""All layers of a decoder in one call, where every part of them has a compiled kernel: see cbatch_kernels/decoder.py.

Built by cbatch/models/patch.py in the place of a model's list of fused layers, whose modules it keeps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from cbatch_kernels.decoder import CompiledDecoder, DecoderLayer, LayerCache, Norm
from torch import Tensor, nn

from cbatch.models.attention import PagedStep, inputs_of_layer
from cbatch.models.fused import FusedAttention, FusedLayer, FusedMLP, FusedRMSNorm
from cbatch.models.projections import CompiledProduct


class FusedDecoder(nn.Module):
    """A decoder's layers as one module, called in the place of the first of them."""

    def __init__(self, layers: Sequence[FusedLayer], parts: Sequence[DecoderLayer], library: ctypes.CDLL) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._attention: list[FusedAttention] = [layer.self_attn for layer in layers]
        self._run = CompiledDecoder(library, parts)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], paged: PagedStep, **_: object
    ) -> Tensor:
        """Run the layers over `hidden_states` [1, T, width], which may be changed in place: for the wanted tokens."""
        assert paged.attend is None, "the layers' kernel attends by itself"
        caches = []
        for attention in self._attention:
            layer = attention.layer_idx
            inputs = inputs_of_layer(attention, layer, paged, attention.sliding_window)
            pages = paged.key_pages[layer], paged.value_pages[layer]
            caches.append(LayerCache(*pages, inputs.slot_mapping, inputs.metadata))
        cos, sin = position_embeddings
        hidden = hidden_states[0].contiguous()
        wanted = paged.wanted
        if wanted is not None:
            wanted = torch.unique(wanted) if len(wanted) < len(hidden) else None
        self._run(hidden, cos[0], sin[0], caches, wanted)
        return hidden[None]


def fuse_decoder(layers: Iterable[nn.Module]) -> FusedDecoder | None:
    """Build the module for a model's layers; None where they are not all made of what the kernel knows."""
    found = list(layers)
    fused = [layer for layer in found if isinstance(layer, FusedLayer)]
    parts = [part for layer in fused if (part := _parts_of(layer)) is not None]
    if not parts or len(parts) < len(found):
        return None
    product = fused[0].mlp.down
    assert isinstance(product, CompiledProduct)
    return FusedDecoder(fused, parts, product.library)


def _parts_of(layer: FusedLayer) -> DecoderLayer | None:
    """Take a layer's weights out of its modules; None where one of them is of another kind."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMLP):
        return None
    if layer.after_attention is not None or layer.after_mlp is not None:
        return None
    products = (attention.qkv, attention.output, mlp.gated, mlp.down)
    weights = [product.layer for product in products if isinstance(product, CompiledProduct)]
    norms = (layer.before_attention, layer.before_mlp, attention.query_norm, attention.key_norm)
    found = [Norm(norm.weight, norm.eps) if isinstance(norm, FusedRMSNorm) else None for norm in norms]
    input_norm, output_norm, *head_norms = found
    sizes = {norm.weight.numel() for norm in head_norms if norm is not None}
    if len(weights) < len(products) or input_norm is None or output_norm is None or not sizes <= {attention.head_dim}:
        return None
    if [norm is None for norm in found] != [norm is None for norm in norms]:
        return None
    heads, output, gated, down = weights
    return DecoderLayer(
        input_norm=input_norm,
        heads=heads,
        output=output,
        output_norm=output_norm,
        gated=gated,
        down=down,
        num_heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        sliding_window=attention.sliding_window,
        softcap=attention.softcap,
        rotates=attention.rotates,
        query_norm=head_norms[0],
        key_norm=head_norms[1],
    )
