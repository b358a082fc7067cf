"""`cbatch merge`: join the parts of a sharded job and say how it ended. Called by `app`."""

from __future__ import annotations

import traceback

from cbatch.cli.console import say


def merge_command(output: str, *, force_unlock: bool, quiet: bool, debug: bool) -> int:
    """Merge the parts of the job whose output is `output`, and return the exit code."""
    from cbatch.jobs.merge import merge_parts

    try:
        summary = merge_parts(output, force_unlock=force_unlock)
    except Exception:
        if debug:
            traceback.print_exc()
        raise
    if summary.reason is not None:
        say(f"stopped by {summary.reason}; run the same command again")
    elif not quiet:
        say(f"{summary.rows} rows of {summary.num_parts} parts joined: {summary.output}")
    return summary.exit_code
