"""The one table of what excludes what. A leaf: imports nothing of cbatch but its errors.

Whoever knows more of a run (the job its files, the engine the model and the device) asks `check`, and all do before any
weights load. The docs print the table; `diagnose` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbatch.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a run so far; what is not known excludes nothing."""

    deterministic: bool = False
    cuda_graph: bool = False
    no_cuda_graph: bool = False  # asked for
    async_batching: bool = False
    speculation: bool = False
    attention_library: bool = False  # FlashAttention or FlashInfer
    attention_plans: bool = False  # on the host, every step
    block_sharing: bool = False
    template: bool = False
    prompt_column: bool = False
    shard: bool = False
    completion_order: bool = False
    device: str | None = None
    has_experts: bool = False
    has_windows: bool = False
    openai_batch: bool = False
    input_once: bool = False  # that can be read only once
    parquet_output: bool = False
    stdout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Two things that cannot be together."""

    one: str
    other: str
    excludes: Callable[[Facts], bool]
    why: str
    hint: str = ""  # the way out; without one the first of the two is left out by itself, and the plan says so


NO_SHARING = Exclusion(
    one="allow_block_sharing",
    other="a model with sliding-window layers",
    excludes=lambda facts: facts.block_sharing and facts.has_windows,
    why="the model's sliding-window layers keep no block that another request could use",
)
EXCLUSIONS = (
    Exclusion(
        one="deterministic",
        other="a GPU",
        excludes=lambda facts: facts.deterministic and facts.device not in (None, "cpu"),
        why="deterministic works on the CPU only",
        hint="--device cpu",
    ),
    Exclusion(
        one="deterministic",
        other="a mixture of experts",
        excludes=lambda facts: facts.deterministic and facts.has_experts,
        why="deterministic cannot be held for a mixture of experts: how many rows an expert gets depends on the batch",
        hint="leave --deterministic out",
    ),
    NO_SHARING,
    Exclusion(
        one="use_cuda_graph",
        other="a CPU",
        excludes=lambda facts: facts.cuda_graph and facts.device not in (None, "cuda"),
        why="use_cuda_graph needs a CUDA device",
        hint="leave it out",
    ),
    Exclusion(
        one="use_cuda_graph",
        other="a mixture of experts",
        excludes=lambda facts: facts.cuda_graph and facts.has_experts,
        why="use_cuda_graph cannot capture a mixture of experts, whose shapes depend on the tokens",
        hint="leave it out",
    ),
    Exclusion(
        one="use_async_batching",
        other="a CPU",
        excludes=lambda facts: facts.async_batching and facts.device not in (None, "cuda"),
        why="use_async_batching needs CUDA graphs, and so a CUDA device",
        hint="leave it out",
    ),
    Exclusion(
        one="use_async_batching",
        other="use_cuda_graph off",
        excludes=lambda facts: facts.async_batching and facts.no_cuda_graph,
        why="use_async_batching needs CUDA graphs, whose inputs stay in one place",
        hint="leave one out",
    ),
    Exclusion(
        one="use_async_batching",
        other="a mixture of experts",
        excludes=lambda facts: facts.async_batching and facts.has_experts,
        why="use_async_batching needs CUDA graphs, which cannot capture a mixture of experts",
        hint="leave it out",
    ),
    Exclusion(
        one="use_async_batching",
        other="speculation",
        excludes=lambda facts: facts.async_batching and facts.speculation,
        why="use_async_batching prepares a step before the tokens are known that speculation guesses from",
        hint="leave one out",
    ),
    Exclusion(
        one="--attention flash_attn or flashinfer",
        other="a CPU",
        excludes=lambda facts: facts.attention_library and facts.device not in (None, "cuda"),
        why="FlashAttention and FlashInfer need a CUDA device",
        hint="--attention cbatch",
    ),
    Exclusion(
        one="use_cuda_graph",
        other="--attention flashinfer",
        excludes=lambda facts: facts.cuda_graph and facts.attention_plans,
        why="use_cuda_graph cannot capture FlashInfer, which plans every step on the host",
        hint="leave one out",
    ),
    Exclusion(
        one="--template",
        other="--prompt-column",
        excludes=lambda facts: facts.template and facts.prompt_column,
        why="--template and --prompt-column both say what the prompt is",
        hint="leave one out",
    ),
    Exclusion(
        one="--shard",
        other="standard input, or another stream",
        excludes=lambda facts: facts.shard and facts.input_once,
        why="a stream that can be read only once cannot be split into shards",
        hint="write it to a file first",
    ),
    Exclusion(
        one="--shard",
        other="--order completion",
        excludes=lambda facts: facts.shard and facts.completion_order,
        why="--shard needs the rows in the order of the input",
        hint="leave --order out",
    ),
    Exclusion(
        one="--shard",
        other="standard output",
        excludes=lambda facts: facts.shard and facts.stdout,
        why="the part of a shard is a file, for cbatch merge",
        hint="-o OUT.jsonl or OUT.parquet",
    ),
    Exclusion(
        one="an OpenAI Batch file",
        other="standard input, or another stream",
        excludes=lambda facts: facts.openai_batch and facts.input_once,
        why="an OpenAI Batch file cannot come from standard input: its custom_ids are checked before anything runs",
        hint="write it to a file first",
    ),
    Exclusion(
        one="an OpenAI Batch file",
        other="Parquet output",
        excludes=lambda facts: facts.openai_batch and facts.parquet_output,
        why="an OpenAI Batch file is answered in its own format, which is JSON lines",
        hint="name an output in .jsonl",
    ),
)


def check(facts: Facts) -> None:
    """Refuse what cannot be together. Raises UsageError."""
    for exclusion in EXCLUSIONS:
        if exclusion.hint and exclusion.excludes(facts):
            raise UsageError(exclusion.why, hint=exclusion.hint)
