"""Spec I2: `--template`, `--system-prompt` and `--keep-columns`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cbatch.errors import RowError, UsageError
from cbatch.jobs.rendering import Renderer
from tests.jobs.jobkit import Bench

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def render(template: str, **columns: Any) -> str:
    text: str = Renderer(template=template).render(columns).value
    return text


@pytest.mark.parametrize(
    ("template", "columns", "text"),
    [
        ("Q: {{question}}\nA:", {"question": "why"}, "Q: why\nA:"),
        ("{{a}} {{b.c[1]}}", {"a": 1, "b": {"c": [2, 3]}}, "1 3"),
        ("{% for item in list %}{{item}},{% endfor %}", {"list": ["x", "y"]}, "x,y,"),
        ("{{ row['two words'] }}", {"two words": "w"}, "w"),
        ("{{ text }}", {"text": "{{ not again }}"}, "{{ not again }}"),
        ("{{ text }}", {"text": "<b> & 'é'"}, "<b> & 'é'"),
        ("{{ t }}\n", {"t": "x"}, "x\n"),
        ("{{ missing | default('none') }}", {"a": 1}, "none"),
        ("{{ null or 'none' }}{% if null is none %}!{% endif %}", {"null": None}, "none!"),
    ],
)
def test_a_template_is_filled_from_the_columns(template: str, columns: dict[str, Any], text: str) -> None:
    assert render(template, **columns) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ missing }}",
        "{{ a.b.c }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ row.__init__.__globals__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ row.clear() }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_fails_on_a_row_is_its_error(template: str) -> None:
    with pytest.raises(RowError) as caught:
        render(template, a="x")
    assert caught.value.code == "template_error"
    assert "columns: a" in caught.value.message


@pytest.mark.parametrize(("value", "says"), [(None, "it prints null"), (b"bytes", "it prints binary data")])
def test_a_value_that_is_no_text_is_not_printed_as_python_shows_it(value: object, says: str) -> None:
    with pytest.raises(RowError, match=says) as caught:
        render("Q: {{ a }}", a=value)
    assert caught.value.code == "template_error"


def test_a_template_that_renders_nothing_is_an_empty_prompt() -> None:
    with pytest.raises(RowError) as caught:
        render("{{ a }}", a="")
    assert caught.value.code == "empty_prompt"


def test_what_is_no_template_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--template is no Jinja template"):
        Renderer(template="{{ open")
    with pytest.raises(UsageError, match="leave one out"):
        Renderer("column", "{{ a }}")


def test_the_template_wins_over_the_rows_own_prompt(bench: Bench) -> None:
    bench.write([{"prompt": "not this", "x": f"{n}"} for n in range(3)] + [{"prompt": "no x"}])
    bench.run(template="x is {{x}}")
    rows = bench.rows()
    assert [row["prompt_tokens"] for row in rows[:3]] == [7, 7, 7]
    assert rows[3]["error"]["message"].startswith(f"{bench.path / 'in.jsonl'}:4: the template failed: 'x' is undefined")
    assert bench.run(template="x was {{x}}").rows_replayed == 1, "only the row that fails either way"


def test_a_system_prompt_goes_first_once() -> None:
    renderer = Renderer(system_prompt="be brief")
    system = {"role": "system", "content": "be brief"}
    assert renderer.render({"prompt": "hi"}).value == [system, USER]
    assert renderer.render({"messages": [USER]}).value == [system, USER]
    own = [{"role": "system", "content": "be long"}, USER]
    assert renderer.render({"messages": own}).value == own
    assert Renderer(template="{{a}}", system_prompt="be brief").render({"a": "hi"}).value == [system, USER]
    with pytest.raises(RowError, match="cannot go before prompt_token_ids"):
        renderer.render({"prompt_token_ids": [5]})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_to_keep_that_no_row_has_is_said(
    bench: Bench, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.output = bench.path / f"out{suffix}"
    bench.write([{"prompt": "a"}, {"prompt": "b", "late": 1}])
    summary = bench.run(keep_columns=("late", "lable"), quiet=False)
    assert summary.report["columns_not_found"] == ["lable"]
    assert "cbatch: no row has the column lable of --keep-columns\n" in capsys.readouterr().err


def test_only_the_columns_to_keep_come_out(bench: Bench) -> None:
    bench.write([{"id": 1, "prompt": "a", "completion": "theirs", "junk": [1]}])
    bench.run(keep_columns=("id",))
    (row,) = bench.rows()
    assert list(row)[:3] == ["id", "row", "completion"]
    assert row["completion"] != "theirs"
    bench.run(keep_columns=("completion", "id"))
    (row,) = bench.rows()
    assert (list(row)[:2], row["completion"]) == (["id", "completion"], "theirs")
    assert bench.num_prompts_run == 1, "another choice of columns runs nothing again"
    bench.output = bench.path / "out.parquet"
    bench.run(keep_columns=("id",))
    assert pq.read_schema(bench.output).names[:3] == ["id", "row", "completion"]
