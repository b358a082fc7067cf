"""Shapes of charts as SVG paths: numbers in, numbers out, in a box of fixed size that the page stretches.

Whatever text a chart has is the page's, so that it keeps its size on any screen. Called by `content`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 200.0
NICE = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True, slots=True)
class Shape:
    """A path, and the name of what it shows, which is its colour's too."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle in the box, and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    text: str = ""


def nice_ceiling(value: float) -> float:
    """Round up to a number that reads well on an axis: 37 → 40."""
    if value <= 0:
        return 1.0
    scale = 1.0
    while scale * 10 <= value:
        scale *= 10
    while scale > value:
        scale /= 10
    return next(scale * nice for nice in NICE if scale * nice >= value * (1 - 1e-9))


def areas(at: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], end: float, top: float) -> list[Shape]:
    """Stack layers of values on one another, each value from its place to the next; `end` is the last one's end."""
    base = [0.0] * len(at)
    shapes = []
    for name, values in layers:
        upper = [below + value for below, value in zip(base, values, strict=True)]
        forward, backward = _steps(at, upper, end, top), _steps(at, base, end, top)
        shapes.append(Shape(name, "M" + " ".join(forward) + " L" + " ".join(reversed(backward)) + " Z"))
        base = upper
    return shapes


def line(name: str, at: Sequence[float], values: Sequence[float], end: float, top: float) -> Shape:
    """Draw values as a line of steps."""
    return Shape(name, "M" + " ".join(_steps(at, values, end, top)))


def columns(counts: Sequence[int], texts: Sequence[str]) -> list[Bar]:
    """Draw a histogram's bins side by side, the fullest as high as the box."""
    most, width = max(counts, default=1) or 1, WIDTH / max(1, len(counts))
    return [
        Bar(_short(i * width), _short(HEIGHT * (1 - n / most)), _short(width * 0.92), _short(HEIGHT * n / most), text)
        for i, (n, text) in enumerate(zip(counts, texts, strict=True))
        if n
    ]


def _steps(at: Sequence[float], values: Sequence[float], end: float, top: float) -> list[str]:
    points = []
    for i, (start, value) in enumerate(zip(at, values, strict=True)):
        stop = at[i + 1] if i + 1 < len(at) else end
        y = _short(HEIGHT * (1 - min(value, top) / top))
        points += [f"{_short(WIDTH * x / end if end > 0 else 0.0)},{y}" for x in (start, max(start, stop))]
    return points


def _short(value: float) -> float:
    return round(value, 1)
