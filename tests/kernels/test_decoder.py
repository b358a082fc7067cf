"""All layers in one call against the reference of every operation, and to the bit against the single calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.compile import load_kernels
from cbatch_kernels.decoder import CompiledDecoder, DecoderLayer, LayerCache, Norm, decoder_ref
from cbatch_kernels.huge_pages import HugeSlabs
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.packed_linear import PackedWeight, linear_packed, pack_gated, pack_weight
from torch import Tensor

WIDTH, INTERMEDIATE, PAGE_SIZE, NUM_PAGES = 24, 40, 4, 40
BATCHES = ([(1, 1)], [(1, 9), (1, 30)], [(7, 7)], [(1, 5), (1, 17), (3, 12), (20, 20)])  # query and context lengths
NUM_PADDING = 2


@dataclass(frozen=True)
class Kind:
    """A kind of layer."""

    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    rotary_dim: int = 8
    has_biases: bool = False
    has_head_norms: bool = False
    is_narrow: bool = False  # weights that bfloat16 holds
    sliding_window: int | None = None
    softcap: float | None = None
    rotates: bool = True


KINDS = (
    Kind(),
    Kind(is_narrow=True, num_heads=9, kv_heads=3, head_dim=16, rotary_dim=16),
    Kind(has_biases=True, sliding_window=6),
    Kind(has_head_norms=True, softcap=5.0),
    Kind(rotates=False),
    Kind(rotary_dim=4, num_heads=2, kv_heads=2),
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = load_kernels(torch.float32)
    if found.library is None:
        pytest.skip(found.reason)
    return found.library


class Draw:
    """Random tensors, one after the other."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * 0.4


def build_layer(library: ctypes.CDLL, kind: Kind, draw: Draw) -> DecoderLayer:
    def parameters(outputs: int, inputs: int) -> tuple[Tensor, Tensor | None]:
        weight = draw(outputs, inputs)
        return weight.bfloat16().float() if kind.is_narrow else weight, draw(outputs) if kind.has_biases else None

    def norm(size: int) -> Norm:
        return Norm(1 + draw(size), 1e-5)

    attended, slabs = kind.num_heads * kind.head_dim, HugeSlabs()
    return DecoderLayer(
        input_norm=norm(WIDTH),
        heads=pack_weight(library, slabs, *parameters(attended + 2 * kind.kv_heads * kind.head_dim, WIDTH)),
        output=pack_weight(library, slabs, *parameters(WIDTH, attended)),
        output_norm=norm(WIDTH),
        gated=pack_gated(library, slabs, parameters(INTERMEDIATE, WIDTH), parameters(INTERMEDIATE, WIDTH), "silu"),
        down=pack_weight(library, slabs, *parameters(WIDTH, INTERMEDIATE)),
        num_heads=kind.num_heads,
        kv_heads=kind.kv_heads,
        head_dim=kind.head_dim,
        scaling=0.3,
        sliding_window=kind.sliding_window,
        softcap=kind.softcap,
        rotates=kind.rotates,
        query_norm=norm(kind.head_dim) if kind.has_head_norms else None,
        key_norm=norm(kind.head_dim) if kind.has_head_norms else None,
    )


def build_caches(kinds: list[Kind], lens: list[tuple[int, int]], draw: Draw) -> list[LayerCache]:
    """Lay the batch out over pages full of what earlier steps wrote; padding goes to the last page."""
    query_lens, context_lens = (np.array(part, dtype=np.int32) for part in zip(*lens, strict=True))
    width = -(-int(context_lens.max()) // PAGE_SIZE)
    tables = torch.randperm(NUM_PAGES - 1, generator=draw.generator)[: len(lens) * width].view(len(lens), width)
    metadata = PagedMetadata.build(query_lens, context_lens, tables.int())
    positions = [(row, context - query + i) for row, (query, context) in enumerate(lens) for i in range(query)]
    slots = [int(tables[row, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for row, at in positions]
    slots += [(NUM_PAGES - 1) * PAGE_SIZE] * NUM_PADDING
    shapes = [(NUM_PAGES, kind.kv_heads, PAGE_SIZE, kind.head_dim) for kind in kinds]
    return [LayerCache(draw(*shape), draw(*shape), torch.tensor(slots), metadata) for shape in shapes]


def one_by_one(
    layer: DecoderLayer, library: ctypes.CDLL, hidden: Tensor, cos: Tensor, sin: Tensor, c: LayerCache
) -> Tensor:
    """Run a layer by the operations that it is made of."""

    def multiply(x: Tensor, weight: PackedWeight, residual: Tensor | None = None) -> Tensor:
        return linear_packed(library, x, weight, residual)

    normed = dispatch.rms_norm(hidden, layer.input_norm.weight, layer.input_norm.eps)
    heads = multiply(normed, layer.heads).view(len(hidden), -1, layer.head_dim)
    query, key, value = heads.tensor_split((layer.num_heads, layer.num_heads + layer.kv_heads), dim=1)
    for part, norm in ((query, layer.query_norm), (key, layer.key_norm)):
        if norm is not None:
            part.copy_(dispatch.rms_norm(part, norm.weight, norm.eps))
    if layer.rotates:
        dispatch.rope_cache_write(query, key, value, cos, sin, c.key_pages, c.value_pages, c.slot_mapping)
    else:
        dispatch.cache_write(key, value, c.key_pages, c.value_pages, c.slot_mapping)
    attended = dispatch.paged_attention(
        query,
        c.key_pages,
        c.value_pages,
        c.metadata,
        scaling=layer.scaling,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
    )
    hidden = multiply(attended.flatten(1), layer.output, hidden)
    normed = dispatch.rms_norm(hidden, layer.output_norm.weight, layer.output_norm.eps)
    return multiply(multiply(normed, layer.gated), layer.down, hidden)


def copies(caches: list[LayerCache]) -> list[LayerCache]:
    return [LayerCache(c.key_pages.clone(), c.value_pages.clone(), c.slot_mapping, c.metadata) for c in caches]


def check_same(caches: list[LayerCache], others: list[LayerCache]) -> None:
    for one, other in zip(caches, others, strict=True):
        assert torch.equal(one.key_pages, other.key_pages)
        assert torch.equal(one.value_pages, other.value_pages)


@pytest.mark.parametrize("lens", BATCHES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_layers_in_one_call(library: ctypes.CDLL, kind: Kind, lens: list[tuple[int, int]]) -> None:
    draw = Draw(len(lens))
    kinds = [kind, kind]
    layers = [build_layer(library, each, draw) for each in kinds]
    caches = build_caches(kinds, lens, draw)
    num_tokens = sum(query for query, _ in lens)
    before, angles = draw(num_tokens + NUM_PADDING, WIDTH), draw(num_tokens + NUM_PADDING, kind.rotary_dim)
    cos, sin = angles.cos(), angles.sin()
    found, found_caches = before.clone(), copies(caches)
    CompiledDecoder(library, layers)(found, cos, sin, found_caches)

    expected, expected_caches = before.clone(), copies(caches)
    decoder_ref(layers, expected, cos, sin, expected_caches)
    torch.testing.assert_close(found[:num_tokens], expected[:num_tokens], rtol=2e-4, atol=2e-4)

    single, single_caches = before.clone(), copies(caches)
    for layer, cache in zip(layers, single_caches, strict=True):
        single = one_by_one(layer, library, single, cos, sin, cache)
    assert torch.equal(found, single)
    check_same(found_caches, single_caches)

    generator = torch.Generator().manual_seed(num_tokens)
    for count in {1, (num_tokens + 1) // 2, num_tokens}:
        order = torch.randperm(num_tokens, generator=generator)
        wanted, others = order[:count].sort().values, order[count:]
        some, some_caches = before.clone(), copies(caches)
        CompiledDecoder(library, layers)(some, cos, sin, some_caches, wanted)
        assert torch.equal(some[wanted], single[wanted])
        assert not (some[others] == single[others]).all(dim=1).any()  # they were not worth the time
        check_same(some_caches, single_caches)
