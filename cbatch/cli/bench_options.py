"""The table of every setting of `cbatch bench`: its own, and those of `run` that say what to run and with what engine.

Used by `app`, `bench` and the docs' generator.
"""

from __future__ import annotations

from cbatch.cli.options import BY_NAME, ENGINE_SETTINGS, MODEL_SETTINGS, ROW_SETTINGS
from cbatch.cli.setting import Bounds, Setting
from cbatch.config import BenchConfig

BENCH = "Bench"
MAX_REPEATS = 1_000
ONLY_IN_OUTPUT = ("keep_columns", "return_token_ids")

BENCH_SETTINGS = (
    Setting(
        name="modes",
        target=BenchConfig,
        panel=BENCH,
        help="The engine's ways to batch that take part, separated by commas.",
        metavar="NAMES",
    ),
    Setting(
        name="against",
        target=BenchConfig,
        panel=BENCH,
        help="Peers that take part: transformers (generate), transformers-cb (its continuous batching), vllm; each "
        "may be followed by = and the path of its Python.",
        default="none",
        metavar="PEER[=PYTHON],...",
    ),
    Setting(
        name="repeats",
        target=BenchConfig,
        panel=BENCH,
        help="Runs of everybody, in turns; medians count.",
        bounds=Bounds(1, MAX_REPEATS),
        metavar="N",
    ),
    Setting(
        name="output",
        target=BenchConfig,
        panel=BENCH,
        help="Write every run's figures to this JSON file.",
        default="none",
        short="-o",
        metavar="FILE",
    ),
)

SETTINGS = (
    *BENCH_SETTINGS,
    *MODEL_SETTINGS,
    *ENGINE_SETTINGS,
    BY_NAME["max_tokens"],
    *(setting for setting in ROW_SETTINGS if setting.name not in ONLY_IN_OUTPUT),
    *(BY_NAME[name] for name in ("quiet", "verbose", "debug")),
)
