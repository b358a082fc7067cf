"""The table of every setting of `cbatch bench`: its own, and those of `run` that say what to run and with what engine.

Used by `app`, `bench` and the docs' generator.
"""

from __future__ import annotations

from cbatch.cli.options import (
    CONSOLE_SETTINGS,
    ENGINE_SETTINGS,
    MODEL_SETTINGS,
    ONLY_IN_OUTPUT,
    ROW_SETTINGS,
    VERBOSE_LIBRARIES,
    named,
    taken_over,
)
from cbatch.cli.setting import Bounds, Setting
from cbatch.config import BenchConfig

BENCH = "Bench"
MAX_REPEATS = 1_000
DEFAULTS = {"max_model_len": "the longest row's", "speculation": "off"}

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
    *taken_over(MODEL_SETTINGS + ENGINE_SETTINGS, defaults=DEFAULTS),
    *named("max_tokens"),
    *taken_over(ROW_SETTINGS, without=ONLY_IN_OUTPUT),
    VERBOSE_LIBRARIES,
    *CONSOLE_SETTINGS,
)
