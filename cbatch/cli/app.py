"""The program `cbatch`: its commands, and what becomes of every way in which one can end. Called by the console script.

Imports neither torch nor a file format: a command imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Annotated, Any, TypeVar

import typer

from cbatch.cli import bench_options, diagnose_options, plan_options, simulate_options, tune_options
from cbatch.cli.bench import bench_command
from cbatch.cli.console import PROGRAM, abandon_broken_streams, prepare_streams, say
from cbatch.cli.diagnose import diagnose_command
from cbatch.cli.help import SettingsCommand
from cbatch.cli.merge import merge_command
from cbatch.cli.options import CONSOLE_SETTINGS, MERGE_SETTINGS, SETTINGS
from cbatch.cli.plan import plan_command
from cbatch.cli.report import report_command
from cbatch.cli.run import run_command
from cbatch.cli.setting import Setting
from cbatch.cli.signature import command_signature, keyword
from cbatch.cli.simulate import simulate_command
from cbatch.cli.tune import tune_command
from cbatch.errors import EXIT_ABORTED, EXIT_FAILED, EXIT_PIPE, CbatchError

app = typer.Typer(
    name=PROGRAM,
    help="Offline batch inference with language models: prompts in, completions and latency columns out.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # slow to import

        typer.echo(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


def _show_help(context: typer.Context, asked: bool) -> None:
    if asked:
        typer.echo(context.get_help())
        raise typer.Exit


_VERSION = Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")]
_HELP = Annotated[bool, typer.Option("--help", "-h", callback=_show_help, is_eager=True, help="Show this message.")]


@app.callback(add_help_option=False)  # Typer's own loads pydantic before every command
def _program(_version: _VERSION = False, _help: _HELP = False) -> None:
    pass


Command = TypeVar("Command", bound=Callable[..., int])

_INPUTS = Parameter(
    "inputs",
    Parameter.POSITIONAL_OR_KEYWORD,
    default=None,
    annotation=Annotated[list[str] | None, typer.Argument(metavar="INPUT", show_default=False)],
)
_CONFIG = keyword(
    "config",
    Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML file of these settings, dashes as underscores; options win."),
    ],
)
_NEEDS_MODEL = "--model MODEL [OPTIONS]"


def _argument(name: str, metavar: str, words: str | None = None) -> Parameter:
    info = typer.Argument(metavar=metavar, show_default=False, help=words)
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[str, info])


def _command(
    name: str, settings: Iterable[Setting], *more: Parameter, usage: str = "[OPTIONS]"
) -> Callable[[Command], Command]:
    """Register a command: `more` are its parameters that are no settings."""

    def register(command: Command) -> Command:
        command.__signature__ = command_signature(settings, *more)  # type: ignore[attr-defined]
        app.command(name, cls=SettingsCommand, options_metavar=usage)(command)
        return command

    return register


@_command("run", SETTINGS, _INPUTS, _CONFIG, usage="--model MODEL -o OUT [OPTIONS]")
def _run(inputs: list[str] | None, config: str | None, **given: Any) -> int:
    """Complete every prompt of an input and write the results, row for row.

    INPUT is a .jsonl, .parquet or .csv file (.gz and .zst too), a pattern, a URL, a folder or the name of a Hugging
    Face dataset, or - for JSON lines on standard input. Several are read one after the other.

    A job that was stopped, by whatever, goes on where it was when the same command runs again.
    """
    return run_command(inputs or [], config, given)


@_command("plan", plan_options.SETTINGS, _INPUTS, _CONFIG, usage=_NEEDS_MODEL)
def _plan(inputs: list[str] | None, config: str | None, **given: Any) -> int:
    """Look at a job without loading the model's weights: which rows will fail, how many tokens, what fits, how long.

    Every row is checked and tokenised as run does it, and goes through the real engine with no model behind it, as if
    every completion were as long as it may be.
    """
    return plan_command(inputs or [], config, given)


@_command("bench", bench_options.SETTINGS, _INPUTS, _CONFIG, usage=_NEEDS_MODEL)
def _bench(inputs: list[str] | None, config: str | None, **given: Any) -> int:
    """Run the same rows in several ways, and with other engines, and compare speed, latency and memory.

    Everybody generates the same number of tokens for every row, greedily. Every run has a process of its own; they take
    turns, and the medians are shown.
    """
    return bench_command(inputs or [], config, given)


@_command("tune", tune_options.SETTINGS, _INPUTS, _CONFIG, usage=_NEEDS_MODEL)
def _tune(inputs: list[str] | None, config: str | None, **given: Any) -> int:
    """Find the engine's fastest settings for an input, and write them for run --config.

    Trials run on a sample of the input's own rows, the model loaded once. Options that are given hold in every trial.
    The default settings are one of the trials, and what is chosen is never slower than they are beyond noise.

    A search that was stopped, by whatever, goes on where it was when the same command runs again.
    """
    return tune_command(inputs or [], config, given)


@_command("simulate", simulate_options.SETTINGS, _CONFIG)
def _simulate(config: str | None, **given: Any) -> int:
    """Run the real scheduler under a virtual clock, a cost in the model's place, and compare ways to batch.

    What a step costs is fitted to a run with --trace, or is a preset's. Predicts how long a job takes with other
    settings or on several GPUs.
    """
    return simulate_command(config, given)


@_command("diagnose", diagnose_options.SETTINGS, _argument("target", "TARGET"))
def _diagnose(target: str, **given: Any) -> int:
    """Name what holds a run back, with the evidence, what to set, and what a simulation says it would gain.

    TARGET is the output of a finished run (with --trace where gains are to be predicted), a TOML file of settings, or a
    vllm command line, in quotes or in a file.
    """
    return diagnose_command(target, given)


@_command("merge", MERGE_SETTINGS, _argument("output", "OUT", "The output of the sharded job."))
def _merge(output: str, **given: Any) -> int:
    """Join the parts of a sharded job into one ordered output."""
    return merge_command(output, given)


_PAGE = keyword(
    "page",
    Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Where it goes. [OUT.report.html]")],
)


@_command("report", CONSOLE_SETTINGS, _argument("output", "OUT", "The output of a finished run."), _PAGE)
def _report(output: str, page: str | None, **given: Any) -> int:
    """Write a page of HTML, in one file: the batch and the cache over time, latencies, requests, settings."""
    return report_command(output, page, given)


def main() -> int:
    """Run the command line and return the exit code; every failure is one line on standard error."""
    prepare_streams()
    try:
        code = typer.main.get_command(app).main(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        say(f"{error.format_message()} (see {context.command_path if context else PROGRAM} --help)")
        return error.exit_code
    except CbatchError as error:
        say(str(error))
        return error.exit_code
    except (BrokenPipeError, SystemExit):  # Typer makes the second of the first
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_ABORTED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"{where}{error.strerror or error} (run again with --debug to see where)")
        return EXIT_FAILED
    except Exception as error:
        say(f"internal error, {type(error).__name__}: {error} (run again with --debug to see where)")
        return EXIT_FAILED
    finally:
        abandon_broken_streams()
