"""The table of every setting of `cbatch tune`: its own, and those of `run` that say what to run and with what engine.

Used by `app`, `tune` and the docs' generator.
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
from cbatch.cli.sampling_options import SAMPLING_SETTINGS
from cbatch.cli.setting import Setting
from cbatch.config import TuneConfig

TUNE = "Tune"
GOODPUT = ("goodput_ttft", "goodput_itl")

TUNE_SETTINGS = (
    Setting(
        name="budget",
        target=TuneConfig,
        panel=TUNE,
        help="End after about this long: 90s, 10m, 1h30m.",
        default="10m where --trials is not given",
        metavar="DURATION",
    ),
    Setting(
        name="trials",
        target=TuneConfig,
        panel=TUNE,
        help="Try at most this many configurations, the default one among them.",
        default="as many as the budget allows",
        metavar="N",
    ),
    Setting(
        name="search",
        target=TuneConfig,
        panel=TUNE,
        help="Search this as well: max_requests_per_batch, scheduler_type, allow_block_sharing, or a setting that is "
        "given, which is held fixed otherwise. May be repeated.",
        default="page_size and max_batch_tokens",
        metavar="NAME",
    ),
    Setting(
        name="output",
        target=TuneConfig,
        panel=TUNE,
        help="Where the settings go, for run --config.",
        short="-o",
        metavar="FILE",
    ),
)

SETTINGS = (
    *TUNE_SETTINGS,
    *MODEL_SETTINGS,
    *ENGINE_SETTINGS,
    *SAMPLING_SETTINGS,
    *taken_over(ROW_SETTINGS, without=ONLY_IN_OUTPUT + GOODPUT),
    *named("restart", "force_unlock", "interrupted_exit_code"),
    VERBOSE_LIBRARIES,
    *CONSOLE_SETTINGS,
)
