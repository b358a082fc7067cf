"""A table of plain text, as wide as what is in it. Used by commands whose tables people and scripts read."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows under a header: the first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)
