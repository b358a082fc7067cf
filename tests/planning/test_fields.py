"""Whether another order of a template's fields is found, what it gains, and when nothing is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import EngineConfig
from cbatch.errors import RowError
from cbatch.jobs.template import RowTemplate
from cbatch.planning.fields import Advice, advise, split_template
from tests.planning.test_job_plan import make_job, make_plan
from tests.tiny_models import build_tiny

RULES = "Answer with one word, in English, without any explanation: "


def rows(count: int = 40) -> list[dict[str, Any]]:
    """A column that is always the same, one of four values, and one that is always different."""
    return [{"rules": RULES, "kind": f"kind {'abcd'[i % 4] * 20}", "text": f"{i:04} and so on"} for i in range(count)]


def ask(template: str, columns: list[dict[str, Any]] | None = None) -> Advice | None:
    """Advise with a token a character."""
    columns = rows() if columns is None else columns

    def encode(candidate: str) -> Iterator[list[int]]:
        compiled = RowTemplate(candidate)
        return ([ord(char) for char in compiled.render(row)] for row in columns)

    return advise(template, columns, encode)


def test_fields_that_hardly_vary_go_first() -> None:
    found = ask("{{text}}\nKind: {{kind}}\nRules: {{ rules }}")
    assert found is not None
    assert found.template == "Rules: {{ rules }}\nKind: {{kind}}\n{{text}}"
    assert found.num_rows == 40
    assert found.num_tokens == sum(len(f"{r['text']}\nKind: {r['kind']}\nRules: {r['rules']}") for r in rows())
    # Then 39 rows share the rules, and 36 a kind with an earlier one; before, they shared three digits at best.
    assert found.gained_tokens > 39 * (len(RULES) + 4) + 36 * len("Kind: kind aaaa") - 39 * 4


def test_instructions_behind_the_last_field_go_before_the_first() -> None:
    found = ask("Text: {{text}}\n\n" + RULES)
    assert found is not None
    assert found.template == f"{RULES.strip()}\n\nText: {{{{text}}}}"


@pytest.mark.parametrize(
    "template",
    [
        "{{rules}}{{kind}}{{text}}",  # the best order already
        RULES + "{{text}}\nAnswer:",  # a cue at the end belongs there
        "{% if kind %}{{text}}{% endif %}{{rules}}",  # logic
        "{{text}}{# a remark #}{{rules}}",
        "no field at all",
        "{{text}}",
    ],
)
def test_where_nothing_is_to_be_gained_or_known_nothing_is_said(template: str) -> None:
    assert ask(template) is None


def test_no_rows_give_no_advice() -> None:
    assert ask("{{text}}{{rules}}", []) is None


def test_rows_that_lack_a_field_are_passed_over() -> None:
    columns = [*rows(), {"text": "without rules"}]
    compiled = RowTemplate("{{rules}}")

    def encode(candidate: str) -> Iterator[list[int]]:
        whole = [row for row in columns if "rules" in row]
        return ([ord(char) for char in RowTemplate(candidate).render(row)] for row in whole)

    with pytest.raises(RowError):
        compiled.render(columns[-1])
    assert advise("{{text}} {{rules}}", columns, encode) is not None


def test_a_template_is_split_as_it_is_written() -> None:
    parts = split_template("a {{ x }} b{{y|upper}}c\n")
    assert parts is not None
    fields, tail = parts
    assert [(field.text, field.expression) for field in fields] == [("a ", "{{ x }}"), (" b", "{{y|upper}}")]
    assert tail == "c\n"
    assert split_template("{% set a = 1 %}{{a}}") is None


def test_a_plan_advises_by_the_models_own_tokens(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model")
    config = EngineConfig(model=str(folder), num_blocks=100)
    job = make_job(tmp_path / "in.jsonl", rows(8), template="{{text}}\n{{rules}}")
    advice = make_plan(job, config).advice
    assert advice is not None
    assert advice.template == "{{rules}}\n{{text}}"
    again = make_plan(make_job(tmp_path / "in.jsonl", rows(8), template=advice.template), config)
    before = make_plan(job, config).rows.shareable_tokens
    assert again.rows.shareable_tokens - before == advice.gained_tokens
    assert again.advice is None
    assert make_plan(make_job(tmp_path / "in.jsonl", [{"prompt": "x"}]), config).advice is None
