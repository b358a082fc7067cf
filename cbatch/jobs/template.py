"""`--template`: a Jinja template of a row's columns, in a sandbox. Called by `rendering`.

The sandbox keeps a template from reaching Python's internals and from endless ranges; a column that a row lacks or that
is null is that row's error, never silently nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbatch.errors import RowError, UsageError

TEMPLATE_ERROR = "template_error"
ROW = "row"  # the whole row, for columns whose names are no identifiers
MAX_LISTED = 8


class RowTemplate:
    """A compiled template."""

    def __init__(self, text: str) -> None:
        """Raises UsageError where the text is no template."""
        from jinja2 import StrictUndefined, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            finalize=_check_printed,
        )
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise UsageError(f"--template is no Jinja template: {error.message}, line {error.lineno}") from None

    def render(self, columns: Mapping[str, Any]) -> str:
        """Return the text for a row. Raises RowError that says what the template lacks."""
        try:
            return self._template.render({ROW: columns, **columns})
        except Exception as error:  # a template runs code, and raises whatever that does
            text = " ".join(str(error).split()) or type(error).__name__
            raise RowError(TEMPLATE_ERROR, f"the template failed: {text} ({list_names(columns)})") from error


def _check_printed(value: object) -> object:
    """Let no prompt say "None" or "b'...'" where a column is null or binary. Raises ValueError."""
    if value is None:
        raise ValueError("it prints null; {{ column or '' }} leaves it out")
    if isinstance(value, bytes):
        raise ValueError("it prints binary data, which is no text")
    return value


def list_names(columns: Mapping[str, Any]) -> str:
    """Spell the columns that a row has, the first few of many."""
    names = ", ".join(list(columns)[:MAX_LISTED]) + (", ..." if len(columns) > MAX_LISTED else "")
    return f"columns: {names}" if columns else "it is empty"
