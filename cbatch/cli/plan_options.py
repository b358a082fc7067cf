"""The table of every setting of `cbatch plan`: its own, and those of `run` that say what to run and with what engine.

Used by `app`, `plan` and the docs' generator.
"""

from __future__ import annotations

from cbatch.cli.options import ENGINE_SETTINGS, MODEL_SETTINGS, ONLY_IN_OUTPUT, ROW_SETTINGS, named, taken_over
from cbatch.cli.sampling_options import SAMPLING_SETTINGS
from cbatch.cli.setting import Setting
from cbatch.config import PlanConfig

PLAN = "Plan"
GOODPUT = ("goodput_ttft", "goodput_itl")

PLAN_SETTINGS = (
    Setting(
        name="calibration",
        target=PlanConfig,
        panel=PLAN,
        help="Estimate the duration by this: the output, report or trace of a finished run, or a file of simulate, "
        "bench or tune.",
        default="no estimate",
        metavar="FILE",
    ),
    Setting(name="json", target=PlanConfig, panel=PLAN, help="Print JSON in place of tables."),
)

SETTINGS = (
    *PLAN_SETTINGS,
    *MODEL_SETTINGS,
    *ENGINE_SETTINGS,
    *SAMPLING_SETTINGS,
    *taken_over(ROW_SETTINGS, without=ONLY_IN_OUTPUT + GOODPUT),
    *named("error_tolerance", "quiet", "verbose", "debug"),
)
