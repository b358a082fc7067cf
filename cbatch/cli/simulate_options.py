"""The table of every setting of `cbatch simulate`: its own, and those of the engine that decide over its schedule.

Used by `app`, `simulate` and the docs' generator.
"""

from __future__ import annotations

from cbatch.cli.options import CONSOLE_SETTINGS, DAY_S, named, taken_over
from cbatch.cli.setting import Bounds, Setting
from cbatch.config import SimulateConfig

COST = "What steps cost"
WORKLOAD = "What comes in"
COMPARISON = "What is compared"
MAX_GPUS = 10_000
DISTRIBUTION = "TOKENS"

SIMULATE_SETTINGS = (
    Setting(
        name="preset",
        target=SimulateConfig,
        panel=COST,
        help="A machine and a model with published figures, its engine and its workload: h100-70b-fp8.",
        default="h100-70b-fp8 where neither --fit nor --calibration is given",
        metavar="NAME",
    ),
    Setting(
        name="fit",
        target=SimulateConfig,
        panel=COST,
        help="Fit to a finished run with --trace, named by its output, and simulate that run.",
        default="none",
        metavar="OUT",
    ),
    Setting(
        name="calibration",
        target=SimulateConfig,
        panel=COST,
        help="What --save-calibration kept of a fit.",
        default="none",
        metavar="FILE",
    ),
    Setting(
        name="save_calibration",
        target=SimulateConfig,
        panel=COST,
        help="Keep cost and engine in this JSON file.",
        default="none",
        metavar="FILE",
    ),
    Setting(
        name="lengths",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="A file whose rows have lengths: a finished run's output, or columns prompt_tokens and max_tokens.",
        default="drawn",
        metavar="FILE",
    ),
    Setting(
        name="rows",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="Requests to draw.",
        default="the preset's, else 1000",
        metavar="N",
    ),
    Setting(
        name="prompt_tokens",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="Lengths of prompts to draw: 512, 64-512, lognormal:MEDIAN:SIGMA, or several with weights, "
        "64-256*3,6000-7000*1.",
        default="the preset's, else 64-512",
        metavar=DISTRIBUTION,
    ),
    Setting(
        name="output_tokens",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="Lengths of completions to draw.",
        default="the preset's, else 16-256",
        metavar=DISTRIBUTION,
    ),
    Setting(
        name="shared_prefix",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="Tokens that all drawn prompts begin with, part of their lengths.",
        bounds=Bounds(0),
        metavar="TOKENS",
    ),
    Setting(
        name="arrivals",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="Requests that arrive a second, at random.",
        default="all at once",
        bounds=Bounds(0, above=True),
        metavar="RATE",
    ),
    Setting(
        name="seed",
        target=SimulateConfig,
        panel=WORKLOAD,
        help="Of what is drawn.",
        bounds=Bounds(0),
        metavar="N",
    ),
    Setting(
        name="modes",
        target=SimulateConfig,
        panel=COMPARISON,
        help="The ways to batch that are simulated, separated by commas.",
        metavar="NAMES",
    ),
    Setting(
        name="reserve",
        target=SimulateConfig,
        panel=COMPARISON,
        help="Simulate waiting batches without pages too, each request taking the cache of so many tokens at once.",
        default="the preset's, else not",
        metavar="TOKENS",
    ),
    Setting(
        name="goodput_ttft",
        target=SimulateConfig,
        panel=COMPARISON,
        help="Count requests as good only whose first token came within these seconds.",
        default="not counted",
        bounds=Bounds(0, DAY_S, above=True),
        metavar="SECONDS",
    ),
    Setting(
        name="goodput_itl",
        target=SimulateConfig,
        panel=COMPARISON,
        help="Count requests as good only whose mean time between tokens was at most these seconds.",
        default="not counted",
        bounds=Bounds(0, DAY_S, above=True),
        metavar="SECONDS",
    ),
    Setting(
        name="gpus",
        target=SimulateConfig,
        panel=COMPARISON,
        help="Plan the job over so many GPUs, a shard each: time and GPU-hours.",
        default="not planned",
        bounds=Bounds(1, MAX_GPUS),
        metavar="N",
    ),
    Setting(
        name="output",
        target=SimulateConfig,
        panel=COMPARISON,
        help="Write all figures to this JSON file.",
        default="none",
        short="-o",
        metavar="FILE",
    ),
)

ENGINE_NAMES = (
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_requests_per_batch",
    "scheduler_type",
    "safety_margin",
    "allow_block_sharing",
    "max_model_len",
)

SETTINGS = (
    *SIMULATE_SETTINGS,
    *taken_over(named(*ENGINE_NAMES), defaults=dict.fromkeys(ENGINE_NAMES, "that of the run or the preset")),
    *CONSOLE_SETTINGS,
)
