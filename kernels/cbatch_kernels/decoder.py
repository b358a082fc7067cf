"""The layers of a decoder of Llama's kind, all in one call: its operations' kernels, one after the other.

    hidden       float32 [T, width], contiguous; changed in place
    cos, sin     float32 [T, rotary_dim], as in `rope_cache_write`
    caches       of each layer: key and value pages, changed in place, and where the step's tokens are written
    wanted       int64 [W], ascending, of the tokens whose result is read: the last layer leaves the others unfinished

A layer norms, attends and adds, norms, gates and adds; with `query_norm` and `key_norm` heads are normed before they
are rotated. Where a step has few rows, what lies between single calls takes as long as some of them. The same numbers
as by single calls, to the bit. Called by `FusedDecoder` of cbatch/models/fused_decoder.py. Leaves out embeddings,
angles and the last norm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch_kernels.compiled_attention import AttentionArguments, batch_arguments
from cbatch_kernels.linear import linear_ref
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.packed_linear import ACTIVATIONS, PackedWeight, unpack
from cbatch_kernels.paged_attention import paged_attention_ref
from cbatch_kernels.rms_norm import rms_norm_ref
from cbatch_kernels.rope_cache_write import rope_cache_write_ref


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm's weight, float32, and what it adds to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer's weights, and what its attention is."""

    input_norm: Norm
    heads: PackedWeight  # queries, keys and values
    output: PackedWeight
    output_norm: Norm
    gated: PackedWeight
    down: PackedWeight
    num_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    rotates: bool = True
    query_norm: Norm | None = None  # of one head's size
    key_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer reads and writes in a step."""

    key_pages: Tensor  # float32 [num_pages, kv_heads, page_size, head_dim]
    value_pages: Tensor
    slot_mapping: Tensor  # int64 [T]
    metadata: PagedMetadata


def decoder_ref(
    layers: Sequence[DecoderLayer], hidden: Tensor, cos: Tensor, sin: Tensor, caches: Sequence[LayerCache]
) -> None:
    """Run the layers, in place."""
    for layer, cache in zip(layers, caches, strict=True):
        hidden += _linear_ref(_attend_ref(layer, hidden, cos, sin, cache), layer.output)
        normed = rms_norm_ref(hidden, layer.output_norm.weight, layer.output_norm.eps)
        hidden += _linear_ref(_linear_ref(normed, layer.gated), layer.down)


def _attend_ref(layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache) -> Tensor:
    normed = rms_norm_ref(hidden, layer.input_norm.weight, layer.input_norm.eps)
    heads = _linear_ref(normed, layer.heads).view(len(hidden), -1, layer.head_dim)
    query, key, value = heads.tensor_split((layer.num_heads, layer.num_heads + layer.kv_heads), dim=1)
    for part, norm in ((query, layer.query_norm), (key, layer.key_norm)):
        if norm is not None:
            part.copy_(rms_norm_ref(part, norm.weight, norm.eps))
    if not layer.rotates:
        cos, sin = cos[:, :0], sin[:, :0]
    rope_cache_write_ref(query, key, value, cos, sin, cache.key_pages, cache.value_pages, cache.slot_mapping)
    return paged_attention_ref(
        query,
        cache.key_pages,
        cache.value_pages,
        cache.metadata,
        scaling=layer.scaling,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
    ).flatten(1)


def _linear_ref(x: Tensor, layer: PackedWeight) -> Tensor:
    (weight, bias), *gated = unpack(layer)
    product = linear_ref(x, weight, bias, layer.activation)
    return product * linear_ref(x, *gated[0]) if gated else product


class _Norm(ctypes.Structure):  # here and below as in csrc/decoder_float32.cpp
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class _Product(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _Norm),
        ("query_norm", _Norm),
        ("key_norm", _Norm),
        ("output_norm", _Norm),
        ("heads", _Product),
        ("output", _Product),
        ("gated", _Product),
        ("down", _Product),
        ("num_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("rotates", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Place(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):  # strides count elements
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("angle_stride", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("wanted", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
    )


class CompiledDecoder:
    """Runs the layers of one model by the compiled kernels."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DecoderLayer]) -> None:
        """Lay out what stays the same from step to step. The layers' tensors must stay where they are."""
        self._library = library
        self._layers = layers
        self._width = layers[0].down.out_features
        assert all(layer.down.out_features == layer.output.out_features == self._width for layer in layers)
        self._structures = (_Layer * len(layers))(*map(_layer_structure, layers))
        library.cbatch_decoder_workspace.restype = ctypes.c_int64
        arguments = (self._structures, ctypes.c_int64(len(layers)), ctypes.c_int64(self._width))
        self._token_workspace = int(library.cbatch_decoder_workspace(*arguments))

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, caches: Sequence[LayerCache], wanted: Tensor | None = None
    ) -> None:
        """Run the layers, in place; as the reference, for the tokens that are wanted: all where nothing is said."""
        num_tokens = len(hidden)
        assert wanted is None or (wanted.dtype == torch.int64 and wanted.is_contiguous())
        assert hidden.dtype == cos.dtype == sin.dtype == torch.float32
        assert hidden.shape == (num_tokens, self._width)
        assert hidden.is_contiguous()
        assert cos.shape == sin.shape
        assert cos.stride() == sin.stride() == (cos.stride(0), 1)
        workspace = torch.empty(num_tokens * self._token_workspace)
        attention: dict[int, AttentionArguments] = {}  # by metadata, which layers of a type share
        places = (_Place * len(self._layers))()
        for place, layer, cache in zip(places, self._layers, caches, strict=True):
            key = id(cache.metadata)
            if key not in attention:
                attention[key] = batch_arguments(
                    cache.metadata, cache.key_pages, cache.value_pages, num_tokens=num_tokens, num_heads=layer.num_heads
                )
            place.keys, place.values = cache.key_pages.data_ptr(), cache.value_pages.data_ptr()
            place.attention = ctypes.addressof(attention[key])
            place.slot_mapping = cache.slot_mapping.data_ptr()
        batch = _Batch(
            hidden.data_ptr(),
            workspace.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            cos.shape[1],
            num_tokens,
            self._width,
            torch.get_num_threads(),
            None if wanted is None else wanted.data_ptr(),
            0 if wanted is None else len(wanted),
        )
        self._library.cbatch_decoder(self._structures, places, ctypes.c_int64(len(places)), ctypes.byref(batch))


def _layer_structure(layer: DecoderLayer) -> _Layer:
    return _Layer(
        *map(_norm_structure, (layer.input_norm, layer.query_norm, layer.key_norm, layer.output_norm)),
        *map(_product_structure, (layer.heads, layer.output, layer.gated, layer.down)),
        layer.num_heads,
        layer.kv_heads,
        layer.head_dim,
        layer.rotates,
        layer.sliding_window or 0,
        layer.scaling,
        layer.softcap or 0.0,
    )


def _norm_structure(norm: Norm | None) -> _Norm:
    if norm is None:
        return _Norm(None, 0.0)
    assert norm.weight.dtype == torch.float32
    assert norm.weight.is_contiguous()
    return _Norm(norm.weight.data_ptr(), norm.eps)


def _product_structure(layer: PackedWeight) -> _Product:
    return _Product(
        layer.panels.data_ptr(),
        None if layer.bias is None else layer.bias.data_ptr(),
        layer.out_features,
        layer.is_gated,
        ACTIVATIONS[layer.activation],
        layer.panels.dtype == torch.bfloat16,
    )
