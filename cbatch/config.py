"""What the user asked for: frozen, and None means "choose for me". A leaf: imports nothing of cbatch.

`EngineConfig` is answered by `cbatch.engine.plan.EnginePlan`, which holds every decided value with its reason.
The command line and a TOML file (`--config`) both build these; the field names are the option names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["auto", "cbatch", "flash_attn", "flashinfer"]

DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings as asked for, spelled as in transformers' continuous batching."""

    model: str  # a folder, a .gguf file, or a hub repository
    revision: str | None = None
    tokenizer: str | None = None  # where it is not the model's own
    dtype: Dtype = "auto"
    device: Device = "auto"
    trust_remote_code: bool = False
    max_model_len: int | None = None  # tokens of prompt and completion together
    page_size: int | None = None  # tokens of KV in a page
    num_blocks: int | None = None  # whole-model blocks of page_size tokens
    max_batch_tokens: int | None = None  # query tokens per forward pass
    max_requests_per_batch: int | None = None
    max_memory_percent: float | None = None  # share of the device memory that is free, 0 to 1
    scheduler_type: str | None = None
    safety_margin: float | None = None  # share of the cache kept from new requests; 0 disables
    allow_block_sharing: bool | None = None
    cpu_offload_space: float = 0.0  # GiB of host memory for the KV of requests that are moved out
    speculation: bool | None = None  # drafts of what the prompt says as well; None: in small batches
    deterministic: bool | None = None  # the same bits whatever the batch; None: where that costs nothing
    attention: Attention = "auto"  # ours, which is also what auto takes, or a library's
    use_cuda_graph: bool | None = None  # decode steps captured once per padded shape and replayed
    use_async_batching: bool | None = None  # a step is prepared while the one before it computes
    q_padding_interval_size: int | None = None  # query tokens to whose multiples captured steps are padded
    kv_padding_interval_size: int | None = None  # the same of the tokens of a context


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops; every value decided."""

    max_tokens: int | None = None  # None: DEFAULT_MAX_TOKENS, cut to what context and cache leave
    min_tokens: int = 0  # nothing but max_tokens ends the completion before these
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]; 1 keeps all
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0  # share of the likeliest token's probability that a token needs; 0 keeps all
    repetition_penalty: float = 1.0  # divides the logits of tokens in prompt and output; 1 changes nothing
    presence_penalty: float = 0.0  # taken from the logits of tokens in the output
    frequency_penalty: float = 0.0  # taken once for every time that they are in it
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, and what is added to its logit
    seed: int = 0  # together with the position decides the random stream
    n: int = 1  # samples, each with a stream of its own
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # likeliest tokens wanted beside each generated one's log-probability; None: no scores
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    json_schema: str | None = None  # JSON; at most one of this and the next three
    json_object: bool = False
    regex: str | None = None  # of the whole completion
    choice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A job as asked for: files, rows, and what happens to failures."""

    inputs: tuple[str, ...]
    output: str
    sampling: dict[str, object] = field(default_factory=dict)  # given on the command line; a row overrides
    generation_config: Literal["auto", "none"] = "auto"  # whether the model's own sampling defaults count
    prompt_column: str | None = None
    template: str | None = None  # Jinja, of a row's columns; makes the prompt
    system_prompt: str | None = None  # goes before the prompt, in the chat template
    dataset_split: str | None = None
    keep_columns: tuple[str, ...] | None = None  # the input's columns that the output has; None: all
    shard: str | None = None  # "i/n", or "slurm": this process's part of the rows
    row_params: bool = True
    limit: int | None = None
    on_overlong: Literal["error", "truncate-left", "truncate-right"] = "error"
    return_token_ids: bool = False
    order: Literal["input", "completion"] = "input"
    max_errors: int | None = None  # end the job early at this many row errors
    error_tolerance: float = 0.0  # share of rows that may fail with exit code 0
    seed: int = 0  # rows without a seed of their own get one hashed from this and their key
    restart: bool = False  # forget the finished rows of earlier runs
    retry_errors: bool = False  # run the rows again that failed
    checkpoint_dir: str | None = None  # where the journal is kept; None: beside the output
    trace: bool = False  # write down every step, beside the output
    force_unlock: bool = False  # take the output's lock from whoever holds it
    grace: float = 20.0  # seconds that running rows get to finish after a signal
    interrupted_exit_code: int = 75  # of a run that a signal stopped in order
    goodput_ttft: float | None = None  # seconds to the first token that a good row keeps
    goodput_itl: float | None = None  # mean seconds between tokens that a good row keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """A search for the engine's settings as asked for."""

    output: str = "tuned.toml"
    trials: int | None = None  # distinct configurations at most, the default one among them
    budget: str | None = None  # a duration: "90s", "10m", "1h30m"
    search: tuple[str, ...] = ()  # beside those that always are searched; a given one begins at its value


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A comparison as asked for: who runs, how often, and where the figures go."""

    modes: str = "naive,static,continuous,continuous+chunked"
    against: str | None = None  # peers, each with the path of its interpreter where that is not this one
    repeats: int = 3
    output: str | None = None  # a JSON file


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """A simulation as asked for: what steps cost, what comes in, and what is compared."""

    preset: str | None = None
    fit: str | None = None  # the output of a traced run
    calibration: str | None = None  # a file that keeps a fit
    save_calibration: str | None = None
    lengths: str | None = None  # a file whose rows say how long they are
    rows: int | None = None  # drawn
    prompt_tokens: str | None = None  # a distribution: "64-512"
    output_tokens: str | None = None
    shared_prefix: int = 0  # tokens that all prompts begin with
    arrivals: float | None = None  # requests a second; None: all at once
    seed: int = 0
    modes: str = "naive,static,continuous,continuous+chunked"
    reserve: int | None = None  # tokens that each request of an engine without pages takes at once
    goodput_ttft: float | None = None  # seconds
    goodput_itl: float | None = None
    gpus: int | None = None  # shards to plan the job over
    output: str | None = None  # a JSON file


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """A look ahead as asked for."""

    calibration: str | None = None  # what says how fast the engine is
    json: bool = False  # to standard output, in place of tables


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseConfig:
    """A diagnosis as asked for, beside what is looked at."""

    preset: str | None = None  # of the costs, where a configuration is looked at
    calibration: str | None = None
    lengths: str | None = None  # a file whose rows say how long they are
    vllm_version: str | None = None
    output: str | None = None  # a JSON file
