"""`cbatch merge`: join the parts of a sharded job and say how it ended. Called by `app`."""

from __future__ import annotations

from typing import Any

from cbatch.cli.console import say, showing_traceback
from cbatch.cli.options import MERGE_SETTINGS
from cbatch.cli.run_options import read_given
from cbatch.cli.setting import ConsoleConfig


def merge_command(output: str, given: dict[str, Any]) -> int:
    """Merge the parts of the job whose output is `output`, and return the exit code."""
    from cbatch.jobs.merge import merge_parts

    found = read_given([], None, given, MERGE_SETTINGS)
    console = found.build(ConsoleConfig)
    with showing_traceback(debug=console.debug):
        summary = merge_parts(output, force_unlock=found.values.get("force_unlock", False))
    if summary.reason is not None:
        say(f"stopped by {summary.reason}; run the same command again")
    elif not console.quiet:
        say(f"{summary.rows} rows of {summary.num_parts} parts joined: {summary.output}")
    return summary.exit_code
