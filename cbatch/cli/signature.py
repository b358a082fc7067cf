"""The signature of a Typer command, built from the table of settings. Used by `app`.

Values arrive as text and are converted by the settings themselves, so that the command line and a TOML file are
checked by the same code and worded alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from cbatch.cli.setting import ConsoleConfig, Setting


def command_signature(settings: Iterable[Setting], *extra: inspect.Parameter) -> inspect.Signature:
    """Return `extra` followed by one keyword parameter for each setting and one hidden one for each of its aliases."""
    parameters = list(extra)
    for setting in settings:
        parameters.append(_parameter(setting.name, setting, hidden=False))
        parameters += [_parameter(alias, setting, hidden=True) for alias in setting.aliases]
    return inspect.Signature(parameters)


def keyword(name: str, annotation: Any, default: object = None) -> inspect.Parameter:
    """A parameter of a command, given by name."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(name: str, setting: Setting, *, hidden: bool) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    hints = {"flag": bool | None, "texts": list[str] | None, "ints": list[str] | None}
    if setting.kind == "flag" and setting.target is not ConsoleConfig:
        option += f"/--no-{option[2:]}"
    info = typer.Option(
        *([option, setting.short] if setting.short else [option]),
        help=setting.help,
        hidden=hidden,
        metavar="|".join(setting.choices) or setting.metavar,
        show_default=setting.default_words or False,
        rich_help_panel=setting.panel,
    )
    return keyword(name, Annotated[hints.get(setting.kind, str | None), info])
