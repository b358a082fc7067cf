"""How a command's `--help` reads: the options in their panels, names never cut, a compact entry each. Used by `app`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

OTHER = "Other options"


class SettingsCommand(TyperCommand):
    """A command whose help groups its options by `rich_help_panel`, in the order of the parameters."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        params: list[Any] = self.get_params(ctx)
        for param in params:
            if param.param_type_name == "option" and not param.hidden:
                panels.setdefault(param.rich_help_panel or OTHER, []).append(_entry(param))
        rest = panels.pop(OTHER)
        for panel, entries in (*panels.items(), (OTHER, rest)):
            with formatter.section(panel):
                formatter.write_dl(entries, col_max=34)


def _entry(option: Any) -> tuple[str, str]:
    """What stands left and right for one option."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + option.secondary_opts[0]
    elif not option.is_flag:
        names += f" {option.metavar}"
    default = option.show_default
    if not isinstance(default, str):
        return names, option.help
    return names, f"{option.help} [{default if default == 'required' else f'default: {default}'}]"
