"""The process's streams: made safe at start, and the one way in which the command line speaks to a person.

Used by `app` and `run`. Results and data go to standard output, everything else to standard error. Leaves out progress
while a job runs, which the job itself draws.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

PROGRAM = "cbatch"


def prepare_streams() -> None:
    """Open closed standard streams on the null device, and let no character fail on an ASCII terminal.

    A process started with a closed stream (`2>&-`, some job schedulers) would otherwise give its number to the next
    file that it opens, and whatever a library prints would end up in there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon_broken_streams() -> None:
    """Send what is still buffered for a reader that has gone to the null device, where it cannot fail at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def one_line(text: str) -> str:
    """Join a message's lines, and show control characters escaped."""
    joined = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in joined)


def say(message: str) -> None:
    """Print one line on standard error, whatever state that is in."""
    with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it: the exit code still says it
        print(f"{PROGRAM}: {one_line(message)}", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def showing_traceback(*, debug: bool) -> Iterator[None]:
    """Show where in the code an error arose, where that was asked for."""
    try:
        yield
    except Exception:
        if debug:
            traceback.print_exc()
        raise


def summary_console(stream: TextIO | None = None) -> Console:
    """A rich console on standard error: plain text unless that is a terminal, NO_COLOR honoured."""
    from rich.console import Console

    return Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)


def quieten_libraries(*, verbose: bool) -> None:
    """Keep the chatter of the model libraries out of logs, unless asked for."""
    if verbose:
        return
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
