"""The table of every setting of `cbatch tune`: its own, and those of `run` that say what to run and with what engine.

Used by `app`, `tune` and the docs' generator.
"""

from __future__ import annotations

from cbatch.cli.options import BY_NAME, ENGINE_SETTINGS, MODEL_SETTINGS, ROW_SETTINGS
from cbatch.cli.sampling_options import SAMPLING_SETTINGS
from cbatch.cli.setting import Setting
from cbatch.config import TuneConfig

TUNE = "Tune"
ONLY_IN_OUTPUT = ("keep_columns", "return_token_ids", "goodput_ttft", "goodput_itl")

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
    *(setting for setting in ROW_SETTINGS if setting.name not in ONLY_IN_OUTPUT),
    *(BY_NAME[n] for n in ("restart", "force_unlock", "interrupted_exit_code", "quiet", "verbose", "debug")),
)
