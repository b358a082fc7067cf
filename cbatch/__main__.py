"""The console script, and `python -m cbatch`."""

from __future__ import annotations

import sys

from cbatch.errors import EXIT_ABORTED


def main() -> int:
    """Run the command line; Ctrl-C ends it quietly even before it is there."""
    try:
        from cbatch.cli.app import main as command_line
    except KeyboardInterrupt:
        return EXIT_ABORTED
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
