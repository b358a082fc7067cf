"""Whether another order of a template's fields would give prompts a longer common beginning. Called by `job_plan`.

A field's text, with what stands before it, moves as a whole. Fields that hardly vary come first, and what stands behind
the last field comes before all where that is a text of its own, such as instructions. Templates with logic are left
alone: what they print where is not theirs to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cbatch.errors import RowError
from cbatch.jobs.template import RowTemplate
from cbatch.planning.prefixes import PrefixTree

MAX_ROWS = 1_000
LEAST_GAIN = 0.02  # of the prompt tokens: less is not worth a change
LEAST_TAIL_GAIN = 16.0  # tokens a row: as much the text behind the last field must bring to go before the first

Encode = Callable[[str], Iterable[Sequence[int]]]  # a template → the prompts of the first rows


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a template, with the text before it."""

    text: str
    expression: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A template that says the same in another order, and what more of the prompts could be shared."""

    template: str
    gained_tokens: int
    num_rows: int  # on so many of the first rows
    num_tokens: int  # of their prompts

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def split_template(template: str) -> tuple[list[Field], str] | None:
    """Split a template into its fields and the text behind the last one; None where it has logic or no field."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    fields: list[Field] = []
    text, expression, is_inside = "", "", False
    for _, kind, value in ImmutableSandboxedEnvironment(keep_trailing_newline=True).lex(template):
        if kind == "data":
            text += value
        elif kind == "variable_begin":
            expression, is_inside = value, True
        elif kind == "variable_end":
            fields.append(Field(text, expression + value))
            text, is_inside = "", False
        elif is_inside:
            expression += value
        else:
            return None
    return (fields, text) if fields else None


def advise(template: str, rows: Sequence[Mapping[str, Any]], encode: Encode) -> Advice | None:
    """Find a better order for the fields; `rows` are the first of the input, `encode` gives their prompts."""
    parts = split_template(template)
    if parts is None or not rows:
        return None
    fields, tail = parts
    now, num_tokens, num_rows = _shareable(encode(template))
    ordered = sorted(fields, key=lambda field: _num_different(field, rows))
    body = _join(ordered, first=fields[0])
    best = (0, template)
    for candidate, least in ((body + tail, LEAST_GAIN * num_tokens), (_before(tail, body), LEAST_TAIL_GAIN * num_rows)):
        if candidate != template:
            gain = _shareable(encode(candidate))[0] - now
            if gain >= max(least, LEAST_GAIN * num_tokens, best[0] + least if best[0] else 0):
                best = (gain, candidate)
    return Advice(best[1], best[0], num_rows, num_tokens) if best[0] > 0 else None


def _join(ordered: Sequence[Field], first: Field) -> str:
    """Write fields in another order; the blanks before the one that now comes first go to the one that did."""
    if ordered[0] is first:
        return "".join(field.text + field.expression for field in ordered)
    head = ordered[0].text.lstrip()
    blanks = ordered[0].text[: len(ordered[0].text) - len(head)]
    rest = (f"{blanks if field is first else ''}{field.text}{field.expression}" for field in ordered[1:])
    return head + ordered[0].expression + "".join(rest)


def _before(tail: str, body: str) -> str:
    """Put the text behind the last field before the first one."""
    return f"{tail.strip()}\n\n{body.lstrip()}"


def _num_different(field: Field, rows: Sequence[Mapping[str, Any]]) -> int:
    """Count the texts that a field has."""
    template = RowTemplate(field.expression)
    texts = set()
    for row in rows:
        try:
            texts.add(template.render(row))
        except RowError:
            continue
    return len(texts)


def _shareable(prompts: Iterable[Sequence[int]]) -> tuple[int, int, int]:
    """Count the tokens that could be shared, all tokens, and prompts."""
    tree = PrefixTree()
    shared = total = count = 0
    for ids in prompts:
        shared += tree.add(ids)
        total += len(ids)
        count += 1
    return shared, total, count
