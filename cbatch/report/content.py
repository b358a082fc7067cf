"""What the page shows, in plain values: figures, charts, tables. Made from a run's report and its trace; read by the
page's template, which decides how it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.errors import InputError
from cbatch.jobs.paths import report_path, trace_path
from cbatch.jobs.report import read_report
from cbatch.jobs.totals import BINS_PER_DECADE
from cbatch.report.history import History, RequestHistory, read_history, reported_history
from cbatch.report.shapes import WIDTH, Bar, Shape, areas, columns, line, nice_ceiling
from cbatch.units import format_bytes, format_duration

LATENCIES = (
    ("ttft_s", "time to first token"),
    ("itl_mean_s", "mean time between tokens"),
    ("e2e_s", "from handed in to finished"),
)
PERCENT = 0.01
ROW_HEIGHT = 6.0  # of a request in the timeline

Names = Sequence[tuple[str, str]]  # of what is shown, and of its column


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Shapes over time, their axis and what they are called."""

    title: str
    says: str  # in a sentence, for those who do not see it
    shapes: list[Shape]
    lines: list[Shape]
    top: str
    end: str
    marks: list[float]  # where a resumed job's sessions begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often a latency was how long."""

    title: str
    bars: list[Bar]
    most: str  # rows in the fullest bin
    low: str
    high: str
    figures: list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A row for each of some requests, in bars of their states."""

    rows: list[list[tuple[str, Bar]]]
    height: float
    end: str
    shown: int
    preempted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The whole page."""

    title: str
    facts: list[tuple[str, str]]
    tiles: list[tuple[str, str]]
    charts: list[Chart]
    histograms: list[Histogram]
    timeline: Timeline | None
    moves: list[tuple[str, str]]
    settings: list[tuple[str, str, str]]
    errors: list[tuple[str, str]]
    first_error: str | None
    notes: list[str]
    versions: list[tuple[str, str]]


def read_content(output: Path) -> Content:
    """Gather everything about a finished run. Raises InputError where there is no report of it, or a damaged one."""
    path = report_path(output)
    report = read_report(path)
    if not report:
        raise InputError(
            f"there is no report of {output} that can be read at {path}",
            hint="name the output of a finished cbatch run",
        )
    try:
        return _gather(output, report)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"the report {path} is damaged: {type(error).__name__}, {error}"
        raise InputError(
            problem, hint="move output and report away and run the job again: it makes them anew"
        ) from error


def _gather(output: Path, report: dict[str, Any]) -> Content:
    trace = trace_path(output)
    history = read_history(trace) if trace.is_file() else reported_history(report)
    notes = []
    if history is None:
        notes.append("What happened when is in the reports of the parts." if "parts" in report else "Nothing was run.")
    elif not history.has_trace:
        notes.append("Requests one by one, and what the cache kept, are shown of runs with --trace.")
        if (report.get("session") or {}).get("number", 1) > 1:
            notes.append("What happened when is that of the last session of this resumed job.")
    return Content(
        title=output.name,
        facts=_facts(report),
        tiles=_tiles(report),
        charts=_charts(history) if history is not None and history.columns.get("at_s") else [],
        histograms=[h for name, title in LATENCIES if (h := _histogram(report, name, title)) is not None],
        timeline=_timeline(history) if history is not None and history.requests else None,
        moves=[(name, _count(report.get(key))) for key, name in MOVES if report.get(key)],
        settings=_settings(report),
        errors=[(str(code), _count(count)) for code, count in (report.get("errors") or {}).items()],
        first_error=report.get("first_error"),
        notes=notes,
        versions=[(str(name), str(value)) for name, value in (report.get("versions") or {}).items()],
    )


MOVES = (
    ("preemptions", "requests moved out"),
    ("offloads", "kept on the host"),
    ("restores", "copied back"),
    ("soft_resets", "to be computed again"),
    ("recomputed_tokens", "tokens computed again"),
    ("out_of_memory_steps", "steps that ran out of memory"),
)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("model", "started_at", "host")
    facts = [(name.replace("_", " "), str(report[name])) for name in names if report.get(name)]
    inputs = report.get("inputs") or []
    return facts + ([("input", ", ".join(map(str, inputs)))] if inputs else [])


def _tiles(report: dict[str, Any]) -> list[tuple[str, str]]:
    failed = report.get("rows_error") or 0
    cached, prompts = report.get("cached_tokens") or 0, report.get("prompt_tokens") or 0
    tiles = [
        ("rows", _count(report.get("rows"))),
        ("failed", _count(failed)),
        ("output tokens/s", f"{report.get('output_tokens_per_s') or 0.0:,.1f}"),
        ("output tokens", _count(report.get("output_tokens"))),
        ("prompt tokens", _count(prompts)),
        ("reused from the cache", f"{cached / prompts:.0%}" if prompts else "0%"),
        ("generating", _seconds(report.get("generate_s"))),
        ("in all", _seconds(report.get("wall_s"))),
    ]
    waste, peak = report.get("kv_waste_fraction"), report.get("peak_rss_bytes")
    tiles += [("cache without a token", f"{waste:.1%}")] if isinstance(waste, int | float) else []
    tiles += [("peak memory", format_bytes(peak))] if isinstance(peak, int | float) else []
    return [(name, value) for name, value in tiles if value]


def _charts(history: History) -> list[Chart]:
    values, at, end = history.columns, history.columns["at_s"], max(history.end_s, 1e-9)
    marks = [round(WIDTH * mark / end, 1) for mark in history.sessions_at]

    def chart(title: str, says: str, layers: Names, others: Names, top: float, unit: str) -> Chart:
        return Chart(
            title=title,
            says=says,
            shapes=areas(at, [(name, values[key]) for name, key in layers], end, top),
            lines=[line(name, at, values[key], end, top) for name, key in others],
            top=unit,
            end=_seconds(end),
            marks=marks,
        )

    tokens = [p + d for p, d in zip(values["prefill_tokens"], values["decode_tokens"], strict=True)]
    most_tokens = nice_ceiling(max(tokens))
    held = [owned + cached for owned, cached in zip(values["owned"], values["cached"], strict=True)]
    most_held = min(1.0, nice_ceiling(max(held)))
    most_requests = nice_ceiling(max(max(values["running"]), 1.0))
    charts = [
        chart(
            "Tokens in a step",
            f"up to {max(tokens):.0f} tokens, of prompts and of requests that generate",
            [("decode", "decode_tokens"), ("prefill", "prefill_tokens")],
            [],
            most_tokens,
            f"{most_tokens:g}",
        ),
        chart(
            "Requests in the batch",
            f"up to {max(values['running']):.0f} requests at once",
            [("running", "running")],
            [],
            most_requests,
            f"{most_requests:g}",
        ),
        chart(
            "Cache",
            f"up to {max(values['owned']):.0%} of it owned by requests",
            [("owned", "owned"), ("cached", "cached")],
            [("waste", "empty")],
            most_held,
            f"{most_held:.3g}" if most_held < PERCENT else f"{most_held:.0%}",
        ),
    ]
    moved = values["moved"]
    if any(moved):
        most = nice_ceiling(max(moved))
        says = f"{sum(moved):.0f} requests moved out in all"
        charts.append(chart("Requests moved out", says, [("moved", "moved")], [], most, f"{most:g}"))
    return charts


def _histogram(report: dict[str, Any], name: str, title: str) -> Histogram | None:
    table = (report.get("latency") or {}).get(name) or {}
    found = table.get("histogram")
    if not found or not found.get("counts"):
        return None
    counts, first = found["counts"], found["first_bin"]
    edges = [10 ** ((first + i) / BINS_PER_DECADE) for i in range(len(counts) + 1)]
    texts = [f"{_seconds(edges[i])} to {_seconds(edges[i + 1])}: {count:,} rows" for i, count in enumerate(counts)]
    names = (("p50", "median"), ("p90", "P90"), ("p99", "P99"), ("max", "longest"))
    return Histogram(
        title=title,
        bars=columns(counts, texts),
        most=f"{max(counts):,}",
        low=_seconds(edges[0]),
        high=_seconds(edges[-1]),
        figures=[(word, _seconds(table[key])) for key, word in names if key in table],
    )


def _timeline(history: History) -> Timeline:
    end = max(history.end_s, 1e-9)
    start = min([0.0, *(request.segments[0].start for request in history.requests if request.segments)])
    rows = []
    for place, request in enumerate(history.requests):
        scale = WIDTH / (end - start)
        rows.append(
            [
                (
                    segment.state,
                    Bar(
                        round((segment.start - start) * scale, 1),
                        place * ROW_HEIGHT,
                        round(max(0.6, (segment.stop - segment.start) * scale), 1),
                        ROW_HEIGHT * 0.8,
                        _describe(request, segment.state, segment.stop - segment.start),
                    ),
                )
                for segment in request.segments
            ]
        )
    return Timeline(
        rows=rows,
        height=len(rows) * ROW_HEIGHT,
        end=_seconds(end - start),
        shown=len(rows),
        preempted=sum(request.preemptions > 0 for request in history.requests),
    )


def _describe(request: RequestHistory, state: str, seconds: float) -> str:
    of = f", sample {request.sample}" if request.sample else ""
    tokens = f"{request.prompt_tokens} + {request.generated} tokens"
    moved = f", moved out {request.preemptions} times" if request.preemptions else ""
    return f"row {request.number}{of}: {state} {_seconds(seconds)} ({tokens}{moved})"


def _settings(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    settings = report.get("settings") or {}
    return [
        (str(name), _plain(setting.get("value")), str(setting.get("reason", "")))
        for name, setting in settings.items()
        if isinstance(setting, dict)
    ]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _seconds(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    if value >= 600:
        return format_duration(value)
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
