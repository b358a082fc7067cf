"""What the engine makes of a card, beside its floor and transformers' own continuous batching; nothing is downloaded.

    python -m tests.gpu.measure_engine [--rows 256 ...]

For whoever has a card; no test calls it there. The model has the shape of Llama-3.1-8B unless told otherwise and random
weights, which lie in a temporary folder meanwhile (16 GB). Prints one JSON object: output tokens a second of both; the
median step in which all rows decode, its floor (the bytes of weights and cache that it reads, at the bandwidth measured
before), and the share of the time in which the card was busy, by torch's profiler over a shorter run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from cbatch.bench.peer_driver import Rows, TransformersContinuous, warm_up_rows
from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.observer import StepRecord
from cbatch.engine.request import Prompt
from tests.tiny_models import build_tiny_tokenizer

STREAMED_BYTES = 2**30  # more than any cache holds
STREAMS = 10
PROFILED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of random tokens for a model of this shape."""

    rows: int = 256
    prompt: int = 128
    output: int = 256
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def length(self) -> int:
        return self.prompt + self.output

    def draw(self) -> Rows:
        rng = random.Random(0)
        return [([rng.randrange(self.vocab) for _ in range(self.prompt)], self.output) for _ in range(self.rows)]


class Steps:
    """Keeps what the engine tells of its steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Workload):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    work = Workload(**vars(parser.parse_args(arguments)))
    with tempfile.TemporaryDirectory() as folder:
        build_model(work, Path(folder))
        figures = measure_engine(work, folder) | {"transformers_tokens_per_s": measure_transformers(work, folder)}
    print(json.dumps(figures, indent=1))


def build_model(work: Workload, folder: Path) -> None:
    """Save a model with random weights, made on the device, and a tokenizer that no row needs."""
    config = LlamaConfig(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        max_position_embeddings=max(8192, work.length),
        tie_word_embeddings=False,
    )
    with torch.device(work.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, work.dtype))
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)


def measure_engine(work: Workload, folder: str) -> dict[str, object]:
    """Run the rows; a step's floor is what the median step of all that only decode has to read."""
    settings = {"dtype": work.dtype, "device": work.device, "max_requests_per_batch": work.rows}
    engine = Engine.load(EngineConfig(model=folder, **settings))  # type: ignore[arg-type]
    run(engine, warm_up_rows(work.vocab, work.length))
    steps = Steps()
    engine.observe(steps)
    taken = run(engine, work.draw())
    pairs = [
        (before, step) for before, step in pairwise(steps.records) if decodes(before, work) and decodes(step, work)
    ]
    bandwidth = measure_bandwidth(work.device)
    num_read = weight_bytes(work) + statistics.median(cache_bytes(step, work) for _, step in pairs)
    step_s = statistics.median(step.times.ended - before.times.ended for before, step in pairs)
    return {
        "device": torch.cuda.get_device_name() if work.device == "cuda" else work.device,
        "plan": {name: setting["value"] for name, setting in engine.plan.settings().items()},
        "tokens_per_s": work.rows * work.output / taken,
        "step_ms": step_s * 1e3,
        "floor_ms": num_read / bandwidth * 1e3,
        "step_over_floor": step_s * bandwidth / num_read,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "busy_share": measure_busy(engine, replace(work, output=min(work.output, PROFILED_TOKENS))),
    }


def measure_transformers(work: Workload, folder: str) -> float:
    """Give its tokens a second for the same rows, once what ours took is free."""
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()
    task = {
        "model": folder,
        "dtype": work.dtype,
        "device": work.device,
        "trust_remote_code": False,
        "max_requests": None,
    }
    peer = TransformersContinuous(task)
    peer.run(warm_up_rows(work.vocab, work.length))
    began = time.perf_counter()
    peer.run(work.draw())
    return work.rows * work.output / (time.perf_counter() - began)


def run(engine: Engine, rows: Iterable[tuple[list[int], int]]) -> float:
    """Give the seconds that rows of exactly so many tokens take."""
    prompts = [Prompt(i, ids, SamplingParams(max_tokens=count, ignore_eos=True)) for i, (ids, count) in enumerate(rows)]
    began = time.perf_counter()
    for output in engine.generate(prompts):
        assert output.error is None, output.error
    return time.perf_counter() - began


def decodes(step: StepRecord, work: Workload) -> bool:
    """Tell whether all rows get a token in a step, and nothing else is computed."""
    return step.prefill_tokens == 0 and step.num_requests == step.decode_tokens == work.rows


def weight_bytes(work: Workload) -> int:
    """Count what every step reads: all weights but the embedding, of which it reads a few rows."""
    head_dim = work.hidden // work.heads
    attention = 2 * work.hidden * head_dim * (work.heads + work.kv_heads)
    layer = attention + 3 * work.hidden * work.intermediate
    return (work.layers * layer + work.vocab * work.hidden) * getattr(torch, work.dtype).itemsize


def cache_bytes(step: StepRecord, work: Workload) -> float:
    """Count the bytes of the keys and values that a step reads."""
    token = 2 * work.layers * work.kv_heads * (work.hidden // work.heads) * getattr(torch, work.dtype).itemsize
    return step.kv_tokens_read * token


def measure_bandwidth(device: str) -> float:
    """Give the bytes that are read in a second: the best of a few."""
    stream = torch.ones(STREAMED_BYTES // 4, device=device)
    times = []
    for _ in range(STREAMS):
        began = time.perf_counter()
        stream.sum().item()  # which waits for it
        times.append(time.perf_counter() - began)
    return STREAMED_BYTES / min(times)


def measure_busy(engine: Engine, work: Workload) -> float | None:
    """Give the share of a run's steps in which a kernel or a copy ran on the card; None without one."""
    if work.device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(engine, work.draw())
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return share_covered(spans)


def share_covered(spans: list[tuple[float, float]]) -> float:
    """Give the share of the time from the first beginning to the last end that lies within any of some sorted spans."""
    covered, reached = 0.0, spans[0][0]
    for begin, end in spans:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered / (reached - spans[0][0])


if __name__ == "__main__":
    main()
