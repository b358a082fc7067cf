"""Write docs/reference.md from the code: every option, every column of the output, and what excludes what.

make docs
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cbatch.cli import bench_options, diagnose_options, plan_options, simulate_options, tune_options
from cbatch.cli.options import SETTINGS
from cbatch.cli.setting import ConsoleConfig, Setting
from cbatch.compatibility import EXCLUSIONS
from cbatch.errors import EXIT_ABORTED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, EXIT_USAGE
from cbatch.io.columns import RESULT_COLUMNS

TARGET = Path(__file__).with_name("reference.md")
TABLE = "| option | value | default | |\n|---|---|---|---|\n"
HEAD = """# Reference

This page is written by `make docs` from the code; a test holds it to that.

## Options of `cbatch run`

`cbatch run [OPTIONS] INPUT...`, where INPUT is a `.jsonl`, `.parquet` or `.csv` file (`.gz` and `.zst` too), a pattern,
a URL, a folder or name of a Hugging Face dataset, or `-` for JSON lines on standard input.

`--config FILE` reads the same settings from a TOML file, under their names with underscores (`max_tokens = 64`); the
inputs are `inputs = ["a.jsonl"]` there. The command line wins over the file. Names in brackets are another engine's
words, accepted in both.
"""
OTHERS = {
    "bench": bench_options.SETTINGS,
    "plan": plan_options.SETTINGS,
    "diagnose": diagnose_options.SETTINGS,
    "simulate": simulate_options.SETTINGS,
    "tune": tune_options.SETTINGS,
}
EXIT_CODES = {
    EXIT_OK: "done, row errors within `--error-tolerance`",
    EXIT_FAILED: "done with more row errors than that, or failed",
    EXIT_USAGE: "an option, a configuration or a model that cannot work; nothing was run",
    EXIT_INTERRUPTED: "stopped in order by a signal: the same command resumes (`--interrupted-exit-code` sets another)",
    EXIT_ABORTED: "aborted by SIGINT before the job began",
    EXIT_PIPE: "standard output was closed by its reader",
}


def options() -> Iterable[str]:
    panel = None
    for setting in SETTINGS:
        if setting.panel != panel:
            panel = setting.panel
            yield f"\n### {panel}\n\n{TABLE}"
        yield _row(setting)


def other_options() -> Iterable[str]:
    """The options of other commands that `run` has not; of the others they take those that make sense there."""
    for command, settings in OTHERS.items():
        yield f"\n## Options of `cbatch {command}` beside those of `run`\n\n{TABLE}"
        yield from (_row(setting) for setting in settings if setting not in SETTINGS)


def exclusions() -> Iterable[str]:
    yield "\n## What excludes what\n\nRefused before any weights load, but where the last column says that it is off.\n"
    yield "\n| | with | because | |\n|---|---|---|---|\n"
    for exclusion in EXCLUSIONS:
        yield f"| {exclusion.one} | {exclusion.other} | {exclusion.why} | {exclusion.hint or 'off by itself'} |\n"


def columns() -> Iterable[str]:
    yield "\n## Columns of the output\n\nThe input's columns come first, then these. Where the input has a column of\n"
    yield "one of these names, ours is written as `cbatch_<name>`.\n\n| column | type | |\n|---|---|---|\n"
    yield from (f"| `{column.name}` | `{column.type}` | {column.description} |\n" for column in RESULT_COLUMNS)


def exit_codes() -> Iterable[str]:
    yield "\n## Exit codes\n\n| code | |\n|---|---|\n"
    yield from (f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())


def render() -> str:
    return "".join((HEAD, *options(), *columns(), *exit_codes(), *exclusions(), *other_options()))


def _row(setting: Setting) -> str:
    return f"| {_names(setting)} | {_values(setting)} | {setting.default_words or ''} | {setting.help} |\n"


def _names(setting: Setting) -> str:
    names = [f"`{setting.short}`"] if setting.short else []
    names.append(f"`{setting.option}`")
    if setting.kind == "flag" and setting.target is not ConsoleConfig:
        names.append(f"`--no-{setting.option[2:]}`")
    aliases = ", ".join(f"`--{alias.replace('_', '-')}`" for alias in setting.aliases)
    return ", ".join(names) + (f" [{aliases}]" if aliases else "")


def _values(setting: Setting) -> str:
    if setting.kind == "flag":
        return ""
    return setting.metavar or "" if setting.kind == "text" else setting.expected


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
