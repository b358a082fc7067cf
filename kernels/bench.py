"""Times an op against its floor and its reference, after its tests: `python kernels/bench.py OP [--rows ...]`.

For whoever works on a kernel; with a red test nothing is timed. The floor is the bytes that have to be moved at the
bandwidth of this machine, or the multiplications at the rate of a large product in float32, whichever takes longer;
both are measured in the same call. Speeds of one machine at one time: compare only what one call prints.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.cache_write import cache_write_ref
from cbatch_kernels.compile import load_kernels
from cbatch_kernels.decoder import CompiledDecoder, DecoderLayer, LayerCache, Norm, decoder_ref
from cbatch_kernels.draw_tokens import DrawRules, draw_tokens_ref
from cbatch_kernels.huge_pages import HugeSlabs
from cbatch_kernels.linear import linear, linear_ref, pack_linear, refuses_packing
from cbatch_kernels.metadata import PagedMetadata
from cbatch_kernels.packed_linear import linear_packed, pack_gated, pack_weight
from cbatch_kernels.paged_attention import paged_attention_ref
from cbatch_kernels.rms_norm import rms_norm_ref
from cbatch_kernels.rope_cache_write import rope_cache_write_ref
from cbatch_kernels.shared_prefix import SharedPrefixes, find_groups

TESTS = Path(__file__).resolve().parent.parent / "tests"
WARM_UP = 3
REPEATS = 20
STREAMED_BYTES = 2**28  # more than any cache holds
PRODUCT_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch to time: one layer of `rows` sequences with `query` new tokens each; by default SmolLM2-135M's."""

    rows: int = 32
    query: int = 1
    context: int = 256
    shared: int = 0  # context tokens that all rows begin with
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    vocab: int = 49152
    dtype: str = "float32"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def num_tokens(self) -> int:
        return self.rows * self.query

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=getattr(torch, self.dtype), device=self.device)


@dataclass(frozen=True, slots=True)
class Timed:
    """What is dispatched, its reference, and what either has to do at least."""

    dispatched: Callable[[], object]
    reference: Callable[[], object]
    num_bytes: int
    num_flops: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=sorted(OPS))
    for field in fields(Sizes):
        kind = int if isinstance(field.default, int) else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = vars(parser.parse_args(arguments))
    op = given.pop("op")
    run_tests(OPS[op].tests)
    sizes = Sizes(**given)
    timed = OPS[op].build(sizes)
    bandwidth, rate = measure_machine(sizes.device)
    ours, reference = measure((timed.dispatched, timed.reference), sizes.device)
    moving, computing = timed.num_bytes / bandwidth, timed.num_flops / rate
    floor = max(moving, computing)
    print(f"{op} with {sizes}")
    print(
        f"this machine      {bandwidth / 1e9:8.1f} GB/s {rate / 1e9:10.1f} GFLOP/s, {torch.get_num_threads()} threads"
    )
    print(f"to be done        {timed.num_bytes / 1e6:8.2f} MB   {timed.num_flops / 1e6:10.2f} MFLOP")
    print(f"floor             {floor * 1e3:8.3f} ms   {'bandwidth' if moving > computing else 'arithmetic'}")
    for name, taken in (("dispatched", ours), ("reference", reference)):
        speeds = f"{timed.num_bytes / taken / 1e9:8.1f} GB/s {timed.num_flops / taken / 1e9:8.1f} GFLOP/s"
        print(f"{name:17} {taken * 1e3:8.3f} ms   {taken / floor:6.2f} x the floor {speeds}")


def run_tests(name: str) -> None:
    """End the program where the op's tests fail: the speed of a wrong answer is of no interest."""
    command = [sys.executable, "-m", "pytest", "-q", str(TESTS / name)]
    if subprocess.run(command, cwd=TESTS.parent, check=False).returncode != 0:
        sys.exit(f"{name} fails: nothing is timed")


def measure_machine(device: str) -> tuple[float, float]:
    """Give the bytes that are read in a second, and the multiplications and additions of a large product."""
    stream = torch.ones(STREAMED_BYTES // 4, device=device)
    factor = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
    reading, multiplying = measure((stream.sum, lambda: factor @ factor), device)
    return STREAMED_BYTES / reading, 2 * PRODUCT_SIZE**3 / multiplying


def measure(calls: tuple[Callable[[], object], Callable[[], object]], device: str) -> tuple[float, float]:
    """Give the median seconds of both, measured alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(WARM_UP + REPEATS):
        for taken, call in zip(times, calls, strict=True):
            synchronize(device)
            began = time.perf_counter()
            call()
            synchronize(device)
            if repeat >= WARM_UP:
                taken.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _pools(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Build key pages, value pages and the rows' tables, scattered as after a while of running."""
    width = -(-sizes.context // sizes.page_size)
    num_pages = sizes.rows * width
    pools = sizes.draw(2, num_pages, sizes.kv_heads, sizes.page_size, sizes.head_dim)
    tables = torch.randperm(num_pages, device=sizes.device).view(sizes.rows, width).to(torch.int32)
    num_shared = sizes.shared // sizes.page_size
    tables[:, :num_shared] = tables[0, :num_shared].clone()
    return pools[0], pools[1], tables


def _paged_attention(sizes: Sizes) -> Timed:
    keys, values, tables = _pools(sizes)
    lens = [np.full(sizes.rows, length, dtype=np.int32) for length in (sizes.query, sizes.context)]
    metadata = PagedMetadata.build(*lens, tables, prefixes=_prefixes(sizes, tables, lens[1]))
    query = sizes.draw(sizes.num_tokens, sizes.heads, sizes.head_dim)
    scaling = sizes.head_dim**-0.5
    num_pages = len(torch.unique(tables))
    seen = sizes.rows * (sizes.query * (sizes.context - sizes.query) + sizes.query * (sizes.query + 1) // 2)
    return Timed(
        lambda: dispatch.paged_attention(query, keys, values, metadata, scaling=scaling),
        lambda: paged_attention_ref(query, keys, values, metadata, scaling=scaling),
        num_pages * (keys[0].nbytes + values[0].nbytes) + 2 * query.nbytes,
        4 * seen * sizes.hidden,
    )


def _prefixes(sizes: Sizes, tables: torch.Tensor, context_lens: npt.NDArray[np.int32]) -> SharedPrefixes | None:
    """Find what the engine would: rows of one token that begin with the same pages, where a kernel looks at that."""
    device = torch.device(sizes.device)
    if sizes.query > 1 or not dispatch.takes_shared_prefixes(device, sizes.head_dim):
        return None
    groups = find_groups(tables.cpu().numpy(), context_lens, sizes.page_size)
    return SharedPrefixes.build(groups, sizes.rows, sizes.page_size, device) if groups else None


def _draw_tokens(sizes: Sizes) -> Timed:
    """Half of the rows are cut off by top-k and top-p."""
    logits = sizes.draw(sizes.rows, sizes.vocab) * 3
    is_cut = np.arange(sizes.rows) % 2 == 0
    rules = DrawRules(
        temperature=np.ones(sizes.rows, dtype=np.float32),
        top_p=np.where(is_cut, 0.9, 1).astype(np.float32),
        top_k=np.where(is_cut, 50, 0),
        min_p=np.zeros(sizes.rows, dtype=np.float32),
        uniform=np.random.default_rng(0).random(sizes.rows),
    )
    return Timed(
        lambda: dispatch.draw_tokens(logits, rules),
        lambda: draw_tokens_ref(logits, rules),
        logits.nbytes,
        logits.numel(),
    )


def _cache_write(sizes: Sizes) -> Timed:
    keys, values, _ = _pools(sizes)
    key, value = sizes.draw(2, sizes.num_tokens, sizes.kv_heads, sizes.head_dim)
    slots = torch.randperm(sizes.rows * sizes.context, device=sizes.device)[: sizes.num_tokens]
    return Timed(
        lambda: dispatch.cache_write(key, value, keys, values, slots),
        lambda: cache_write_ref(key, value, keys, values, slots),
        4 * key.nbytes,
        0,
    )


def _rms_norm(sizes: Sizes) -> Timed:
    x, weight = sizes.draw(sizes.num_tokens, sizes.hidden), torch.ones(sizes.hidden, device=sizes.device)
    return Timed(
        lambda: dispatch.rms_norm(x, weight, 1e-5), lambda: rms_norm_ref(x, weight, 1e-5), 2 * x.nbytes, 4 * x.numel()
    )


def _rope_cache_write(sizes: Sizes) -> Timed:
    keys, values, _ = _pools(sizes)
    merged = sizes.draw(sizes.num_tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    query, key, value = merged.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
    angles = sizes.draw(sizes.num_tokens, sizes.head_dim)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(sizes.rows * sizes.context, device=sizes.device)[: sizes.num_tokens]
    return Timed(
        lambda: dispatch.rope_cache_write(query, key, value, cos, sin, keys, values, slots),
        lambda: rope_cache_write_ref(query, key, value, cos, sin, keys, values, slots),
        2 * merged.nbytes + 2 * angles.nbytes,
        3 * (merged.numel() - value.numel()),
    )


def _linear(sizes: Sizes) -> Timed:
    """A layer that widens what it gets four times."""
    x, weight = sizes.draw(sizes.num_tokens, sizes.hidden), sizes.draw(4 * sizes.hidden, sizes.hidden)
    if (refused := refuses_packing(weight.dtype, weight.device)) is not None:
        sys.exit(f"there are no packed layers to time: {refused}")
    layer = pack_linear(weight)
    return Timed(
        lambda: linear(x, layer, "silu"),
        lambda: linear_ref(x, weight, None, "silu"),
        weight.nbytes + 5 * x.nbytes,
        2 * sizes.num_tokens * weight.numel(),
    )


def _packed_linear(sizes: Sizes) -> Timed:
    """As `_linear`, without an activation, over a weight that bfloat16 holds, against PyTorch's product."""
    kernels = load_kernels(torch.float32)
    if kernels.library is None or sizes.device != "cpu" or sizes.dtype != "float32":
        sys.exit(f"there are no compiled products to time: {kernels.reason}")
    x, weight = sizes.draw(sizes.num_tokens, sizes.hidden), sizes.draw(4 * sizes.hidden, sizes.hidden)
    weight = weight.to(torch.bfloat16).float()
    layer, library = pack_weight(kernels.library, HugeSlabs(), weight, None), kernels.library
    return Timed(
        lambda: linear_packed(library, x, layer),
        lambda: linear_ref(x, weight, None),
        layer.panels.nbytes + 5 * x.nbytes,
        2 * sizes.num_tokens * weight.numel(),
    )


def _decoder(sizes: Sizes) -> Timed:
    """One layer as Llama's, eight thirds as wide within, over weights that bfloat16 holds."""
    kernels = load_kernels(torch.float32)
    if kernels.library is None or sizes.device != "cpu" or sizes.dtype != "float32":
        sys.exit(f"there are no compiled layers to time: {kernels.reason}")
    library, slabs, wide = kernels.library, HugeSlabs(), sizes.hidden * 8 // 3
    shapes = [(sizes.hidden + 2 * sizes.kv_heads * sizes.head_dim, sizes.hidden), (sizes.hidden, sizes.hidden)]
    shapes += [(wide, sizes.hidden), (wide, sizes.hidden), (sizes.hidden, wide)]
    weights = [(sizes.draw(*shape) * shape[1] ** -0.5).to(torch.bfloat16).float() for shape in shapes]
    heads, output, gate, up, down = weights
    norm = Norm(torch.ones(sizes.hidden), 1e-5)
    layer = DecoderLayer(
        input_norm=norm,
        heads=pack_weight(library, slabs, heads, None),
        output=pack_weight(library, slabs, output, None),
        output_norm=norm,
        gated=pack_gated(library, slabs, (gate, None), (up, None), "silu"),
        down=pack_weight(library, slabs, down, None),
        num_heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        scaling=sizes.head_dim**-0.5,
        sliding_window=None,
        softcap=None,
        rotates=True,
        query_norm=None,
        key_norm=None,
    )
    keys, values, tables = _pools(sizes)
    lens = [np.full(sizes.rows, length, dtype=np.int32) for length in (sizes.query, sizes.context)]
    slots = torch.randperm(sizes.rows * sizes.context)[: sizes.num_tokens]
    caches = [LayerCache(keys, values, slots, PagedMetadata.build(*lens, tables))]
    hidden, angles = sizes.draw(sizes.num_tokens, sizes.hidden), sizes.draw(sizes.num_tokens, sizes.head_dim)
    cos, sin = angles.cos(), angles.sin()
    decoder, attention = CompiledDecoder(library, [layer]), _paged_attention(sizes)
    num_weights = sum(weight.numel() for weight in weights)
    return Timed(
        lambda: decoder(hidden.clone(), cos, sin, caches),
        lambda: decoder_ref([layer], hidden.clone(), cos, sin, caches),
        2 * num_weights + 2 * hidden.nbytes + attention.num_bytes,
        2 * sizes.num_tokens * num_weights + attention.num_flops,
    )


@dataclass(frozen=True, slots=True)
class Op:
    """How an op is set up, and the file of its tests."""

    build: Callable[[Sizes], Timed]
    tests: str


OPS = {
    "paged_attention": Op(_paged_attention, "kernels/test_paged_attention.py"),
    "draw_tokens": Op(_draw_tokens, "kernels/test_draw_tokens.py"),
    "cache_write": Op(_cache_write, "kernels/test_cache_write.py"),
    "rms_norm": Op(_rms_norm, "kernels/test_row_ops.py"),
    "rope_cache_write": Op(_rope_cache_write, "kernels/test_row_ops.py"),
    "linear": Op(_linear, "models/test_patch.py"),
    "decoder": Op(_decoder, "kernels/test_decoder.py"),
    "packed_linear": Op(_packed_linear, "kernels/test_packed_linear.py"),
}

if __name__ == "__main__":
    main()
