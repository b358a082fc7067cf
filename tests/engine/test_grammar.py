"""Structured output from a hostile model: random weights at temperature 2, and every output is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import SamplingParams
from cbatch.engine import grammar
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.models.load import LoadedModel
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import EOS_ID, build_tiny

pytest.importorskip("llguidance")

LABEL = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad", None, 3]},
        "score": {"type": "integer", "minimum": 1, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "sure": {"type": "boolean"},
    },
    "required": ["label", "score", "tags"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {
        "leaf": {"type": "object", "properties": {"v": {"const": 1}}, "required": ["v"], "additionalProperties": False}
    },
    "anyOf": [
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"$ref": "#/$defs/leaf"},
        {"type": "array", "maxItems": 2, "items": {"type": "null"}},
    ],
}


def is_label(value: Any) -> bool:
    return (
        {"label", "score", "tags"} <= value.keys() <= LABEL["properties"].keys()
        and value["label"] in ["good", "bad", None, 3]
        and type(value["score"]) is int
        and 1 <= value["score"] <= 100
        and len(value["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 5 for tag in value["tags"])
        and isinstance(value.get("sure", True), bool)
    )


def is_nested(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch("[a-c]{2,4}", value) is not None
    return value == {"v": 1} or (isinstance(value, list) and len(value) <= 2 and set(value) <= {None})


CHOICES = ("yes", "no", "n", 'say "hi"', "é\n\\", "/x/ | y", "👍")

# What is asked for, and what must hold of a text that ended by itself.
ASKED: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json_schema": json.dumps(LABEL)}, lambda text: is_label(json.loads(text))),
    ({"json_schema": json.dumps(NESTED)}, lambda text: is_nested(json.loads(text))),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": r"[0-9]{3}-[a-z]{1,8}"}, lambda text: re.fullmatch(r"[0-9]{3}-[a-z]{1,8}", text) is not None),
    ({"regex": "^(a|ab|é{1,3}|x.y)$"}, lambda text: re.fullmatch("a|ab|é{1,3}|x.y", text) is not None),
    ({"choice": CHOICES}, lambda text: text in CHOICES),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = build_tiny("llama", tmp_path_factory.mktemp("llama"))
    return load_tiny(folder)


def hostile(loaded: LoadedModel, params: dict[str, Any], count: int = 40, **settings: object) -> list[RequestOutput]:
    prompts = [
        Prompt(i, make_tokens(6, i), SamplingParams(**({"max_tokens": 120, "temperature": 2.0, "seed": i} | params)))
        for i in range(count)
    ]
    return run(make_engine(loaded, **settings), *prompts)


@pytest.mark.parametrize(
    ("asked", "holds"), ASKED, ids=lambda value: next(iter(value), "") if isinstance(value, dict) else ""
)
def test_an_output_that_ended_by_itself_is_what_was_asked_for(
    loaded: LoadedModel, asked: dict[str, Any], holds: Callable[[str], bool]
) -> None:
    outputs = hostile(loaded, asked)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    texts = [output.text(loaded.tokenizer.decode) for output in ended]
    assert all(holds(text) for text in texts)
    assert len(ended) > 20 or "json_object" in asked
    assert len(set(texts)) >= 3
    for output in outputs:
        assert output.error is None
        assert (output.finish_reason == "length") == (len(output.token_ids) == 120 and output.token_ids[-1] != EOS_ID)


def test_the_whole_alternatives_of_a_choice_come_up(loaded: LoadedModel) -> None:
    texts = {output.text(loaded.tokenizer.decode) for output in hostile(loaded, {"choice": CHOICES}, 200)}
    assert texts == set(CHOICES)


def test_a_choice_may_have_thousands_of_alternatives(loaded: LoadedModel) -> None:
    labels = tuple(f"label {i}" for i in range(3000))
    texts = {output.text(loaded.tokenizer.decode) for output in hostile(loaded, {"choice": labels}, 20)}
    assert texts <= set(labels)
    assert len(texts) > 10


@pytest.mark.parametrize(
    "settings", [{"num_blocks": 12, "page_size": 8}, {"max_batch_tokens": 5}, {"max_requests_per_batch": 1}]
)
def test_structures_do_not_depend_on_neighbours_or_the_schedule(
    loaded: LoadedModel, settings: dict[str, object]
) -> None:
    prompts = [
        Prompt(
            i,
            make_tokens(20, i),
            SamplingParams(
                **{"max_tokens": 50, "temperature": i % 3 * 1.0, "seed": i} | (ASKED[i % 7][0] if i % 7 < 6 else {})
            ),
        )
        for i in range(14)
    ]
    expected = run(make_engine(loaded), *prompts)
    assert [o.token_ids for o in run(make_engine(loaded, **settings), *prompts[::-1])] == [
        o.token_ids for o in expected
    ]


def test_min_tokens_holds_as_long_as_the_grammar_goes_on(loaded: LoadedModel) -> None:
    for least, length in ((3, 4), (5, 6), (30, 7)):
        (output,) = run(
            make_engine(loaded),
            Prompt(
                0, make_tokens(5), SamplingParams(regex="[a-f]{1,6}", min_tokens=least, logit_bias=((EOS_ID, 90.0),))
            ),
        )
        assert len(output.token_ids) == length
        assert (output.finish_reason, output.token_ids[-1]) == ("stop", EOS_ID)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"json_schema": '{"type": "strin"}'}, "json_schema does not compile: Invalid type"),
        ({"json_schema": '{"not": {}}'}, "Unimplemented keys"),
        ({"json_schema": '{"$ref": "#/gone"}'}, "json_schema does not compile"),
        ({"regex": "("}, "regex does not compile"),
        ({"regex": "(?=a)b"}, "look-around"),
    ],
)
def test_what_does_not_compile_is_that_rows_error(loaded: LoadedModel, asked: dict[str, Any], named: str) -> None:
    bad, good = run(
        make_engine(loaded),
        Prompt(0, make_tokens(5), SamplingParams(**asked)),
        Prompt(1, make_tokens(5), SamplingParams(regex="ab")),
    )
    assert bad.error is not None
    assert bad.error.code == "bad_grammar"
    assert named in str(bad.error)
    assert "\n" not in str(bad.error)
    assert good.text(loaded.tokenizer.decode) == "ab"


def test_a_grammar_that_breaks_midway_is_that_rows_error(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    catch_up = grammar.Constraint.catch_up

    def break_at_two(self: grammar.Constraint, generated: Sequence[int]) -> None:
        catch_up(self, generated)
        if len(generated) == 2:
            self.matcher.consume_token(EOS_ID)

    monkeypatch.setattr(grammar.Constraint, "catch_up", break_at_two)
    bad, good = run(
        make_engine(loaded),
        Prompt(0, make_tokens(5), SamplingParams(max_tokens=5, regex="aaaa")),
        Prompt(1, make_tokens(5), SamplingParams(max_tokens=5, regex="a|b")),
    )
    assert bad.error is not None
    assert bad.error.code == "grammar_failed"
    assert len(bad.token_ids) == 2
    assert good.text(loaded.tokenizer.decode) in ("a", "b")


def test_what_a_grammar_needs_is_there_before_the_first_step_where_it_is_known_to_come(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    grammars = engine._intake._grammars
    engine.prepare(SamplingParams())
    assert grammars._tokenizer is None
    engine.prepare(SamplingParams(regex="("))  # its row will have the error
    engine.prepare(SamplingParams(regex="ab"))
    assert grammars._tokenizer is not None
    (output,) = run(engine, Prompt(0, make_tokens(5), SamplingParams(regex="ab")))
    assert output.text(loaded.tokenizer.decode) == "ab"
    assert grammars._compile.cache_info().hits == 1


def test_equal_grammars_are_compiled_once(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    run(engine, *(Prompt(i, make_tokens(5, i), SamplingParams(max_tokens=8, **ASKED[i % 2][0])) for i in range(10)))
    assert engine._intake._grammars._compile.cache_info().misses == 2


def test_samples_of_one_prompt_each_follow_the_grammar(loaded: LoadedModel) -> None:
    (output,) = run(
        make_engine(loaded), Prompt(0, make_tokens(5), SamplingParams(n=8, temperature=2.0, choice=CHOICES))
    )
    texts = [sample.text(loaded.tokenizer.decode) for sample in output.samples]
    assert set(texts) <= set(CHOICES)
    assert len(set(texts)) > 1


def test_without_the_package_the_error_says_what_to_install(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "is_installed", lambda: False)
    (output,) = run(make_engine(loaded), Prompt(0, make_tokens(5), SamplingParams(regex="a")))
    assert output.error is not None
    assert "pip install 'cbatch[structured]'" in str(output.error)
