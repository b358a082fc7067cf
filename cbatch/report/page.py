"""Writes the page: one file that needs no other, drawn by its template. Called by `cbatch report`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from cbatch.io.atomic import AtomicFile
from cbatch.report.content import Content, read_content
from cbatch.report.shapes import HEIGHT, WIDTH

TEMPLATE = "page.html"


def html_path(output: Path) -> Path:
    """Return where the page of an output goes."""
    return output.with_name(f"{output.name}.report.html")


def write_page(output: Path, page: Path) -> None:
    """Write the page of a finished run. Raises InputError, OutputError."""
    text = render(read_content(output))
    with AtomicFile(page) as file:
        file.file.write(text.encode("utf-8", "backslashreplace"))
        file.commit()


def render(content: Content) -> str:
    """Draw the page; every text in it is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(content=content, width=WIDTH, height=HEIGHT)
