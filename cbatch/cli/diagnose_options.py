"""The table of every setting of `cbatch diagnose`. Used by `app`, `diagnose` and the docs' generator."""

from __future__ import annotations

from cbatch.cli.options import CONSOLE_SETTINGS
from cbatch.cli.setting import Setting
from cbatch.config import DiagnoseConfig

DIAGNOSE = "Diagnose"

DIAGNOSE_SETTINGS = (
    Setting(
        name="calibration",
        target=DiagnoseConfig,
        panel=DIAGNOSE,
        help="For a configuration: what steps cost, as `cbatch simulate --save-calibration` kept it of a run.",
        default="the preset's",
        metavar="FILE",
    ),
    Setting(
        name="preset",
        target=DiagnoseConfig,
        panel=DIAGNOSE,
        help="For a configuration: what steps cost on a machine with published figures.",
        default="h100-70b-fp8",
        metavar="NAME",
    ),
    Setting(
        name="lengths",
        target=DiagnoseConfig,
        panel=DIAGNOSE,
        help="For a configuration: a file whose rows have lengths, such as a finished run's output.",
        default="the preset's workload",
        metavar="FILE",
    ),
    Setting(
        name="vllm_version",
        target=DiagnoseConfig,
        panel=DIAGNOSE,
        help="Of vLLM, whose command line is looked at: leaves out what newer versions no longer refuse.",
        default="any",
        metavar="VERSION",
    ),
    Setting(
        name="output",
        target=DiagnoseConfig,
        panel=DIAGNOSE,
        help="Write what was found to this JSON file.",
        default="none",
        short="-o",
        metavar="FILE",
    ),
)

SETTINGS = (*DIAGNOSE_SETTINGS, *CONSOLE_SETTINGS)
