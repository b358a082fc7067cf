"""Runs an engine whose cache is full and whose batches are the largest, and prints what that took. Linux only.

    python -m tests.engine.measure_memory MODEL_FOLDER FREE_BYTES SETTINGS_AS_JSON

Called by test_sizing, in a process of its own: what others left in the heap would count.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path

import torch
import transformers  # noqa: F401  # counts as an import, not as the engine's memory
from transformers import LlamaForCausalLM  # noqa: F401

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine import engine as engine_module
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt
from cbatch.engine.runner import ModelRunner
from cbatch.engine.sizing import longest_context, step_footprint
from cbatch.models.fused_decoder import FusedDecoder
from cbatch.models.inspect import inspect_model
from cbatch.models.memory import FreeMemory
from cbatch.models.projections import CompiledProduct, OneDnnGate, OneDnnProjection

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def status(name: str) -> int:
    """Read a field of this process's status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def peak_anonymous() -> int:
    """The most anonymous memory since the last reset; what is mapped from files does not shrink."""
    return status("VmHWM") - status("RssFile") - status("RssShmem")


def weight_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of a model's weights, those included that fused modules have packed."""
    parts = [part for m in model.modules() for part in vars(m).values()]
    packed = [part.layer.weight for part in parts if isinstance(part, OneDnnProjection)]
    packed += [layer.weight for part in parts if isinstance(part, OneDnnGate) for layer in (part.first, part.second)]
    packed += [part.layer.panels for part in parts if isinstance(part, CompiledProduct)]
    packed_bytes = sum(weight.shape.numel() * weight.itemsize for weight in packed)
    return packed_bytes + sum(p.nbytes for p in model.parameters())


def main(folder: str, free_bytes: int, settings: dict[str, object]) -> dict[str, int]:
    torch.nn.functional.linear(torch.zeros(64, 64), torch.zeros(64, 64))
    after_imports = status("RssAnon")
    engine_module.free_memory = lambda _: FreeMemory(free_bytes, "what the test says")
    engine = Engine.load(EngineConfig(model=folder, dtype="float32", **settings))  # type: ignore[arg-type]
    gc.collect()
    loaded = status("RssAnon")
    runner, plan = engine._runner, engine.plan
    assert isinstance(runner, ModelRunner)
    stores = (runner.key_pages, runner.value_pages, runner.host_key_pages, runner.host_value_pages)
    for pages in stores:
        pages.fill_(0)
    CLEAR_REFS.write_text(RESET_PEAK)
    run_largest_steps(engine)
    shape = inspect_model(engine.config)
    cache_bytes = sum(pages.nbytes for pages in stores[:2])
    footprint = step_footprint(
        shape,
        torch.float32,
        max_batch_tokens=plan.max_batch_tokens,
        max_requests=plan.max_requests_per_batch,
        max_context=longest_context(shape, torch.float32, cache_bytes, plan.max_model_len),
        gathers=not plan.attention.startswith("compiled"),
        in_one_call=any(isinstance(module, FusedDecoder) for module in runner._model.modules()),
    )
    return {
        "measured": peak_anonymous() - after_imports,
        "loaded": loaded - after_imports,
        "weights": weight_bytes(runner._model),
        "cache": cache_bytes,
        "host": sum(pages.nbytes for pages in stores[2:]),
        "step": footprint.total,
        "num_blocks": plan.num_blocks,
    }


def run_largest_steps(engine: Engine) -> None:
    """One prompt that is as long as any, and then as many requests at once as there may be, all sampled with top-p."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, ignore_eos=True)
    longest = min(engine.plan.max_model_len, engine._cache.max_tokens_ever)

    def prompt(request_id: int, length: int) -> Prompt:
        return Prompt(request_id, [rng.randrange(5, 200) for _ in range(length)], params)

    outputs = list(engine.generate([prompt(0, longest - 3)]))
    outputs += engine.generate(prompt(i, 6) for i in range(engine.plan.max_requests_per_batch))
    assert all(output.error is None for output in outputs)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
