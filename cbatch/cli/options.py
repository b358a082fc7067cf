"""The table of every setting of `cbatch run`: options, TOML keys and the docs' table are read off it.

Used by `app` (the command's signature), `config_file` and the docs' generator. A setting is here only once it works.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from cbatch.cli.sampling_options import SAMPLING_SETTINGS
from cbatch.cli.setting import Bounds, ConsoleConfig, Setting
from cbatch.config import EngineConfig, JobConfig

MODEL = "Model"
ENGINE = "Engine"
ROWS = "Rows"
JOB = "Job"

INFERRED = "inferred"
DAY_S = 86_400
TIB_GIB = 1_024
SHARE = Bounds(0, 1, above=True)

MODEL_SETTINGS = (
    Setting(
        name="model",
        target=EngineConfig,
        panel=MODEL,
        help="A folder, a .gguf file, or the name of a Hugging Face hub repository.",
        default="required",
        metavar="MODEL",
    ),
    Setting(
        name="revision",
        target=EngineConfig,
        panel=MODEL,
        help="Branch, tag or commit of the hub repository.",
        default="main",
        metavar="NAME",
    ),
    Setting(
        name="tokenizer",
        target=EngineConfig,
        panel=MODEL,
        help="Folder or repository of the tokenizer.",
        default="the model's",
        metavar="NAME",
    ),
    Setting(name="dtype", target=EngineConfig, panel=MODEL, help="Data type of weights and cache."),
    Setting(name="device", target=EngineConfig, panel=MODEL, help="Where the model runs."),
    Setting(
        name="trust_remote_code",
        target=EngineConfig,
        panel=MODEL,
        help="Run the Python code that a model repository ships.",
    ),
    Setting(
        name="max_model_len",
        target=EngineConfig,
        panel=MODEL,
        help="Most tokens of a prompt and its completion together.",
        default="the model's",
        metavar="TOKENS",
    ),
)

ENGINE_SETTINGS = (
    Setting(
        name="page_size",
        target=EngineConfig,
        panel=ENGINE,
        help="Tokens in a page of the KV cache.",
        default=INFERRED,
        aliases=("block_size",),
        metavar="TOKENS",
    ),
    Setting(
        name="num_blocks",
        target=EngineConfig,
        panel=ENGINE,
        help="Size of the KV cache, in blocks of page-size tokens.",
        default=INFERRED,
        metavar="N",
    ),
    Setting(
        name="max_batch_tokens",
        target=EngineConfig,
        panel=ENGINE,
        help="Most tokens computed in one forward pass.",
        default=INFERRED,
        aliases=("max_num_batched_tokens",),
        metavar="TOKENS",
    ),
    Setting(
        name="max_requests_per_batch",
        target=EngineConfig,
        panel=ENGINE,
        help="Most requests in one forward pass.",
        default=INFERRED,
        aliases=("max_num_seqs",),
        metavar="N",
    ),
    Setting(
        name="max_memory_percent",
        target=EngineConfig,
        panel=ENGINE,
        help="Share of the free memory that the engine may take, as a fraction: 0.6 is 60 %.",
        default=INFERRED,
        bounds=SHARE,
        metavar="FRACTION",
    ),
    Setting(
        name="scheduler_type",
        target=EngineConfig,
        panel=ENGINE,
        help="Who goes first: fifo decodes before it takes on new prompts, prefill_first completes prompts first, "
        "offline takes rows by shared prefix, longest first, and keeps room for what they will grow to.",
        default="fifo",
        only=("fifo", "prefill_first", "offline"),
    ),
    Setting(
        name="safety_margin",
        target=EngineConfig,
        panel=ENGINE,
        help="Share of the KV cache that is kept from new requests; 0 keeps none.",
        default="0.15 for fifo, else 0",
        bounds=Bounds(0, 1, below=True),
        metavar="FRACTION",
    ),
    Setting(
        name="allow_block_sharing",
        target=EngineConfig,
        panel=ENGINE,
        help="Compute a prefix that several prompts share only once.",
        default="on where the model allows it",
    ),
    Setting(
        name="cpu_offload_space",
        target=EngineConfig,
        panel=ENGINE,
        help="Host memory for the cache of requests that are moved out when the device's is full, in GiB.",
        bounds=Bounds(0, TIB_GIB),
        metavar="GIB",
    ),
    Setting(
        name="attention",
        target=EngineConfig,
        panel=ENGINE,
        help="Who computes attention: auto and cbatch take our own kernels, which work everywhere; on a GPU flash_attn "
        "and flashinfer take that library's, if it is installed and gives the same on a batch of random numbers.",
    ),
    Setting(
        name="use_cuda_graph",
        target=EngineConfig,
        panel=ENGINE,
        help="Capture decode steps once per padded shape and replay them.",
        default="on where it can work",
    ),
    Setting(
        name="use_async_batching",
        target=EngineConfig,
        panel=ENGINE,
        help="Prepare a step while the one before it computes.",
        default="on where it can work",
    ),
    Setting(
        name="q_padding_interval_size",
        target=EngineConfig,
        panel=ENGINE,
        help="Query tokens of a captured step are padded to a multiple of this.",
        default="16",
        metavar="TOKENS",
    ),
    Setting(
        name="kv_padding_interval_size",
        target=EngineConfig,
        panel=ENGINE,
        help="Contexts of a captured step are padded to a multiple of this.",
        default="1024",
        metavar="TOKENS",
    ),
    Setting(
        name="speculation",
        target=EngineConfig,
        panel=ENGINE,
        help="Guess tokens from what prompt and completion said before and check several in a step; changes no text.",
        default="in small batches",
    ),
    Setting(
        name="deterministic",
        target=EngineConfig,
        panel=ENGINE,
        help="Give every row the same bits whatever the batch, order, chunks or preemptions; CPU only.",
        default="where it costs nothing",
    ),
)

ROW_SETTINGS = (
    Setting(
        name="prompt_column",
        target=JobConfig,
        panel=ROWS,
        help="The column that holds the prompt.",
        default="prompt_token_ids, messages or prompt, the first that a row has",
        metavar="NAME",
    ),
    Setting(
        name="template",
        target=JobConfig,
        panel=ROWS,
        help="Jinja template that makes the prompt from a row's columns: 'Translate: {{text}}'.",
        default="none",
        metavar="TEXT",
    ),
    Setting(
        name="system_prompt",
        target=JobConfig,
        panel=ROWS,
        help="System message before every prompt, which then goes through the model's chat template.",
        default="none",
        metavar="TEXT",
    ),
    Setting(
        name="dataset_split",
        target=JobConfig,
        panel=ROWS,
        help="The split of a Hugging Face dataset.",
        default="the only one",
        metavar="NAME",
    ),
    Setting(
        name="keep_columns",
        target=JobConfig,
        panel=ROWS,
        help="A column of the input that the output keeps; may be repeated.",
        default="all",
        metavar="NAME",
    ),
    Setting(name="limit", target=JobConfig, panel=ROWS, help="Stop after this many rows.", default="all", metavar="N"),
    Setting(
        name="row_params",
        target=JobConfig,
        panel=ROWS,
        help="Let columns named like sampling parameters override them row by row.",
    ),
    Setting(
        name="on_overlong",
        target=JobConfig,
        panel=ROWS,
        help="What becomes of a prompt that is longer than the context.",
    ),
    Setting(
        name="goodput_ttft",
        target=JobConfig,
        panel=ROWS,
        help="Count rows as good only whose first token came within these seconds.",
        default="not counted",
        bounds=Bounds(0, DAY_S, above=True),
        metavar="SECONDS",
    ),
    Setting(
        name="goodput_itl",
        target=JobConfig,
        panel=ROWS,
        help="Count rows as good only whose mean time between tokens was at most these seconds.",
        default="not counted",
        bounds=Bounds(0, DAY_S, above=True),
        metavar="SECONDS",
    ),
    Setting(name="return_token_ids", target=JobConfig, panel=ROWS, help="Add the column completion_token_ids."),
)

JOB_SETTINGS = (
    Setting(
        name="output",
        target=JobConfig,
        panel=JOB,
        help="Where the results go: a .jsonl or .parquet file; - is standard output, with --checkpoint-dir.",
        default="required",
        short="-o",
        metavar="FILE",
    ),
    Setting(
        name="shard",
        target=JobConfig,
        panel=JOB,
        help="Run part i of n of the rows, i from 0; 'slurm' takes both from the job array or srun.",
        default="all rows",
        metavar="I/N|slurm",
    ),
    Setting(name="order", target=JobConfig, panel=JOB, help="Rows in the order of the input, or as they finish."),
    Setting(
        name="max_errors",
        target=JobConfig,
        panel=JOB,
        help="End the job early once this many rows failed.",
        default="never",
        metavar="N",
    ),
    Setting(
        name="error_tolerance",
        target=JobConfig,
        panel=JOB,
        help="Share of the rows that may fail while the exit code is still 0.",
        bounds=Bounds(0, 1),
        metavar="FRACTION",
    ),
    Setting(
        name="restart",
        target=JobConfig,
        panel=JOB,
        help="Forget what an earlier run of this job finished, and replace its output.",
    ),
    Setting(
        name="retry_errors",
        target=JobConfig,
        panel=JOB,
        help="Of a finished job, run the rows again that failed.",
    ),
    Setting(
        name="checkpoint_dir",
        target=JobConfig,
        panel=JOB,
        help="Folder for the journal from which a job resumes; with -o - for the results as well.",
        default="beside the output",
        metavar="FOLDER",
    ),
    Setting(
        name="trace",
        target=JobConfig,
        panel=JOB,
        help="Write what every step did to FILE.trace.jsonl.gz, for simulate, diagnose and report.",
    ),
    Setting(
        name="force_unlock",
        target=JobConfig,
        panel=JOB,
        help="Take the output's lock from a run that is known to be gone.",
    ),
    Setting(
        name="grace",
        target=JobConfig,
        panel=JOB,
        help="Seconds that running rows get to finish after the first signal to stop.",
        bounds=Bounds(0, DAY_S),
        metavar="SECONDS",
    ),
    Setting(
        name="interrupted_exit_code",
        target=JobConfig,
        panel=JOB,
        help="Exit code of a run that a signal stopped in order.",
        bounds=Bounds(0, 255),
        metavar="N",
    ),
    Setting(name="quiet", target=ConsoleConfig, panel=JOB, help="Print errors and interruptions only.", short="-q"),
    Setting(
        name="verbose", target=ConsoleConfig, panel=JOB, help="Print more: every setting and its reason.", short="-v"
    ),
    Setting(name="debug", target=ConsoleConfig, panel=JOB, help="Show where in the code an error arose."),
)

SETTINGS = MODEL_SETTINGS + ENGINE_SETTINGS + SAMPLING_SETTINGS + ROW_SETTINGS + JOB_SETTINGS
BY_NAME = {setting.name: setting for setting in SETTINGS}
ALIASES = {alias: setting for setting in SETTINGS for alias in setting.aliases}

CONSOLE_SETTINGS = (BY_NAME["quiet"], BY_NAME["debug"])
MERGE_SETTINGS = (BY_NAME["force_unlock"], *CONSOLE_SETTINGS)
ONLY_IN_OUTPUT = ("keep_columns", "return_token_ids")  # for commands that write no rows
VERBOSE_LIBRARIES = replace(BY_NAME["verbose"], help="Show what the model libraries have to say.")


def taken_over(
    settings: Iterable[Setting], *, defaults: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> tuple[Setting, ...]:
    """Give settings of `run` for another command, leaving some out, with its own words for `defaults` that differ."""
    words = defaults or {}
    kept = (setting for setting in settings if setting.name not in without)
    return tuple(replace(s, default=words[s.name]) if s.name in words else s for s in kept)


def named(*names: str) -> tuple[Setting, ...]:
    """Give the settings of `run` that have these names."""
    return tuple(BY_NAME[name] for name in names)
