"""How a plan looks in a terminal. Used by `plan`; the values are those of its JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cbatch.cli.console import summary_console
from cbatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

LENGTH_COLUMNS = ("total", "mean", "min", "p10", "p50", "p90", "p99", "max")


def show_plan(plan: Mapping[str, Any], *, verbose: bool) -> None:
    """Print a plan on standard output; where verbose, every setting with its reason."""
    console = summary_console(sys.stdout)
    _print_pairs(console, "Rows", _rows(plan["rows"]))
    _print_errors(console, plan["rows"]["first_errors"])
    _print_lengths(console, plan["tokens"])
    _print_pairs(console, "Prefixes", _prefix(plan))
    _print_pairs(console, "Memory", _memory(plan["memory"]))
    if plan["dry_run"] is not None:
        _print_pairs(
            console,
            "Run without a model: completions as long as they may be, no token guessed",
            _dry_run(plan["dry_run"]),
        )
    _print_pairs(console, "Duration", _estimate(plan["estimate"]))
    if plan["advice"] is not None:
        _print_pairs(console, "Advice", _advice(plan["advice"]))
    if verbose and plan["settings"] is not None:
        settings = [(name, f"{s['value']} ({s['reason']})") for name, s in plan["settings"].items()]
        _print_pairs(console, "Settings", settings)


def _rows(rows: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [("that can run", f"{rows['rows_ok']:,} of {rows['rows']:,}")]
    if rows["rows_truncated"]:
        pairs.append(("cut to fit the context", f"{rows['rows_truncated']:,}"))
    pairs += [(f"that fail: {code}", f"{count:,}") for code, count in rows["errors"].items()]
    return pairs


def _prefix(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    prefix, prompts = plan["prefix"], plan["tokens"]["prompt"]
    if prompts is None:
        return []
    compared = ""
    if prefix["rows_compared_with"] < plan["rows"]["rows_ok"]:
        compared = f", compared with the first {prefix['rows_compared_with']:,} rows only"
    shared = _share(prefix["shareable_tokens"], prompts["total"])
    pairs = [("shareable at most", f"{prefix['shareable_tokens']:,} tokens, {shared} of the prompts{compared}")]
    if prefix["cached_tokens"] is not None:
        found = _share(prefix["cached_tokens"], prefix["of_prompt_tokens"])
        pairs.append(("found in the cache", f"{prefix['cached_tokens']:,} tokens, {found}{_of_rows(plan)}"))
    return pairs


def _of_rows(plan: Mapping[str, Any]) -> str:
    num_dry = plan["prefix"]["of_rows"]
    return "" if num_dry == plan["rows"]["rows_ok"] else f" of the first {num_dry:,} rows' prompts"


def _memory(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    weights = memory["weight_bytes"]
    token = f"{format_bytes(memory['kv_bytes_per_token'])} a token"
    longest = f"{format_bytes(memory['kv_bytes_of_longest_context'])} a context of {memory['max_model_len']:,}"
    pairs = [
        ("free", f"{format_bytes(memory['free_bytes'])} ({memory['free_source']})"),
        (
            "weights",
            "not known: the checkpoint has no safetensors headers" if weights is None else format_bytes(weights),
        ),
        ("keys and values", f"{token}, {longest} tokens"),
    ]
    if not memory["fits"]:
        return [*pairs, ("cache", "does not fit")]
    cache = (
        f"{format_bytes(memory['cache_bytes'])}, {memory['cache_tokens']:,} tokens in pages of {memory['page_size']}"
    )
    pairs.append(("cache", cache))
    if "paged_waste" in memory:
        whole = f"{memory['contiguous_waste']:.1%} idle, {memory['contexts_at_once_contiguous']:,} requests at once"
        paged = f"{memory['paged_waste']:.1%} idle, {memory['contexts_at_once_paged']:,} requests at once"
        pairs.append(("whole contexts reserved", whole))
        pairs.append(("in pages", paged))
    return pairs


def _dry_run(dry: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("rows", f"{dry['rows']:,}"),
        ("steps", f"{dry['steps']:,}"),
        ("computed", f"{dry['computed_tokens']:,} tokens, and {dry['recomputed_tokens']:,} once more"),
        ("generated", f"{dry['output_tokens']:,} tokens"),
        ("preemptions", f"{dry['preemptions']:,}"),
        ("cache in use", f"{dry['max_cache_usage']:.0%} at most; {dry['kv_waste_fraction']:.1%} of it without a token"),
    ]


def _estimate(estimate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if estimate is None:
        return [("not estimated", "--calibration FILE says how fast this model is here")]
    load = "" if estimate["load_s"] is None else f", and {estimate['load_s']:.0f} s to load"
    pairs = [("at most", f"{format_seconds(estimate['generate_s'])}{load}"), ("by", estimate["source"])]
    return pairs + [("but", doubt) for doubt in estimate["doubts"]]


def _advice(advice: Mapping[str, Any]) -> list[tuple[str, str]]:
    share = _share(advice["gained_tokens"], advice["num_tokens"])
    gain = f"{advice['gained_tokens']:,} tokens more ({share}) could be shared in the first {advice['num_rows']:,} rows"
    return [("another order", gain), ("--template", repr(advice["template"]))]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _print_pairs(console: Console, title: str, pairs: Sequence[tuple[str, str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not pairs:
        return
    table = Table.grid(padding=(0, 2))
    for name, value in pairs:
        table.add_row("", escape(name), escape(value))
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(table)


def _print_errors(console: Console, errors: Sequence[Mapping[str, Any]]) -> None:
    from rich.markup import escape

    for error in errors:
        console.print(escape(f"   row {error['row']}: {error['code']}: {' '.join(error['message'].split())}"))


def _print_lengths(console: Console, tokens: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    if tokens["prompt"] is None:
        return
    table = Table(box=SIMPLE)
    table.add_column("Tokens", no_wrap=True)
    for name in LENGTH_COLUMNS:
        table.add_column(name, justify="right")
    for name, values in tokens.items():
        table.add_row(name.replace("_", " "), *(f"{values[column]:,.0f}" for column in LENGTH_COLUMNS))
    console.print(table)
