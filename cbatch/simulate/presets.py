"""Machines and workloads that are known from publications, fitted once; docs/simulation.md says how.

`h100-70b-fp8` stands for what was published of a 70B model in fp8 on one H100 at 128 concurrent requests: 32,768 prompt
tokens take about 800 ms; about 600 output tokens/s in waiting batches whose requests reserve their whole context, 1,800
with continuous batching and pages, 2,200 to 2,400 with split prompts as well; P99 time between tokens from about 50 ms
to about 15 ms by splitting prompts. It reproduces the ratios, and the absolute figures but the times between tokens:
128 requests that share 2,300 tokens/s have 56 ms between two tokens on average.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.simulate.cost import CostModel
from cbatch.simulate.settings import SimulatedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A cost, an engine and a workload."""

    cost: CostModel
    engine: SimulatedEngine
    rows: int
    prompt_tokens: str
    output_tokens: str
    reserved_tokens: int  # that a request takes at once in the engine without pages to which the others are compared


PREFILL_TOKENS, PREFILL_S = 32_768, 0.8
STEP_S = 0.025  # 70 GB of weights at 84 % of 3.35 TB/s
HIDDEN_TOKENS = 1_024  # that are computed in that time

PRESETS = {
    "h100-70b-fp8": Preset(
        cost=CostModel(
            per_step_s=STEP_S,
            per_query_token_s=(PREFILL_S - STEP_S) / (PREFILL_TOKENS - HIDDEN_TOKENS),
            per_kv_token_s=49e-9,  # 164 kB: 80 layers, 8 KV heads of 128, fp8
            per_request_s=70e-6,
            hidden_tokens=HIDDEN_TOKENS,
        ),
        engine=SimulatedEngine(
            page_size=16,
            num_blocks=16_384,
            max_batch_tokens=1_280,
            max_requests_per_batch=128,
            max_model_len=8_192,
        ),
        rows=1_000,
        prompt_tokens="32-256*3,5500-6500*1",
        output_tokens="48-320",
        reserved_tokens=8_192,
    )
}
