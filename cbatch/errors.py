"""The exception tree, each class with the process's exit code. A leaf: imports nothing of cbatch.

CbatchError            1   the run failed
├── UsageError         2   options, configuration or a model that cannot work
│   ├── UnsupportedModelError
│   └── DoesNotFitError    the memory asked for is not there
├── InputError         1   the input cannot be read (further)
├── OutputError        1   the output cannot be written
├── EngineError        1   the engine failed in the middle of a run
└── RowError           -   one row's failure: recorded in its output row, never ends a run
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75
EXIT_ABORTED = 130  # as a shell reports a process ended by SIGINT
EXIT_PIPE = 141  # and by SIGPIPE


class CbatchError(Exception):
    """A failure that the user is told about in one line, with a hint where there is a way out."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(CbatchError):
    """An option, a configuration or an environment that cannot work."""

    exit_code = EXIT_USAGE


class UnsupportedModelError(UsageError):
    """A model that the engine cannot run, refused before its weights load."""


class DoesNotFitError(UsageError):
    """The device's memory does not hold what was asked for."""


class InputError(CbatchError):
    """An input that cannot be opened, or cannot be read to its end."""


class OutputError(CbatchError):
    """An output that cannot be written."""


class EngineError(CbatchError):
    """A failure of the engine in the middle of a run."""


class RowError(CbatchError):
    """The failure of one row: `code` is machine-readable, the message names the field and the way out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def as_dict(self) -> dict[str, str]:
        """The value of the output column `error`."""
        return {"code": self.code, "message": self.message}
