"""The console script, and `python -m cbatch`."""

from __future__ import annotations

import gc
import sys

from cbatch.errors import EXIT_ABORTED

COLLECTED_AFTER = 100_000  # objects: by default so few that looking for garbage takes a fifth of what importing takes


def main() -> int:
    """Run the command line; Ctrl-C ends it quietly even before it is there."""
    gc.set_threshold(COLLECTED_AFTER)
    try:
        from cbatch.cli.app import main as command_line
    except KeyboardInterrupt:
        return EXIT_ABORTED
    code = command_line()
    gc.freeze()  # what is left goes with the process: to take it apart took seconds
    return code


if __name__ == "__main__":
    sys.exit(main())
