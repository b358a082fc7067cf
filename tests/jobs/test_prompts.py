"""Spec I2: where a row's prompt comes from, and what is refused how."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from cbatch.errors import RowError
from cbatch.jobs.prompts import PromptEncoder
from cbatch.jobs.rendering import Rendered, Renderer
from tests.stub_engine import BOS, FIRST_LETTER, VOCAB_SIZE, StubTokenizer

USER = {"role": "user", "content": "hi"}
CLOCK = datetime(2030, 1, 2)


def refused(columns: dict[str, Any], column: str | None = None) -> RowError:
    with pytest.raises(RowError) as caught:
        encode(columns, column)
    return caught.value


def encode(columns: dict[str, Any], column: str | None = None, **options: Any) -> list[int]:
    encoder = PromptEncoder(options.pop("tokenizer", StubTokenizer()), options.pop("limit", 64), "error", CLOCK)
    rendered = Renderer(column).render(columns)
    rendered.canonical()
    return encoder.encode(rendered, None).token_ids


def text_of(ids: list[int]) -> str:
    return StubTokenizer().decode(ids)


def test_ids_go_before_messages_and_messages_before_text() -> None:
    row: dict[str, Any] = {"prompt": "text", "messages": [USER], "prompt_token_ids": [5, 6]}
    assert encode(row) == [5, 6]
    row["prompt_token_ids"] = None
    assert text_of(encode(row)) == "user: hi\nassistant: "
    row["messages"] = None
    assert text_of(encode(row)) == "text"


def test_a_named_column_wins_over_all() -> None:
    row = {"prompt": "text", "prompt_token_ids": [5], "question": "why", "chat": [USER]}
    assert text_of(encode(row, "question")) == "why"
    assert text_of(encode(row, "chat")) == "user: hi\nassistant: "


def test_one_bos_for_text_and_for_chat_and_none_added_to_ids() -> None:
    assert encode({"prompt": "a"}) == [BOS, ord("a") + FIRST_LETTER]
    assert encode({"messages": [USER]}).count(BOS) == 1
    assert encode({"prompt_token_ids": [7]}) == [7]


def test_tools_and_template_arguments_reach_the_template() -> None:
    ids = encode({"messages": [USER], "tools": [{"name": "f"}], "chat_template_kwargs": {"think": False}})
    assert "{'name': 'f'}" in text_of(ids)
    assert "{'think': False}" in text_of(ids)


@pytest.mark.parametrize("text", [" ", "\n", "0", "null", '{"a": 1}', "name: int64, when: 2024-01-01", "a\u2028b"])
def test_any_text_stays_as_it_is(text: str) -> None:
    assert text_of(encode({"prompt": text})) == text


@pytest.mark.parametrize(
    ("columns", "code", "says"),
    [
        ({}, "no_prompt", "it is empty"),
        ({"text": "x", "id": 1}, "no_prompt", "columns: text, id"),
        ({"prompt": None}, "empty_prompt", "prompt is null"),
        ({"prompt": ""}, "empty_prompt", "prompt is an empty string"),
        ({"prompt": []}, "bad_prompt", "prompt must be a string: it is a list"),
        ({"prompt": {}}, "bad_prompt", "prompt must be a string: it is an object"),
        ({"prompt": 0}, "bad_prompt", "prompt must be a string: it is a number"),
        ({"prompt": False}, "bad_prompt", "prompt must be a string: it is a boolean"),
        ({"prompt": [USER]}, "bad_prompt", "goes into the column messages"),
        ({"prompt": [1, 2]}, "bad_prompt", "go into the column prompt_token_ids"),
        ({"messages": []}, "empty_prompt", "messages is an empty list"),
        ({"messages": {}}, "bad_prompt", "messages must be a list of messages: it is an object"),
        ({"messages": "hi"}, "bad_prompt", "messages must be a list of messages: it is a string"),
        ({"messages": [USER, "hi"]}, "bad_prompt", "messages[1] must be an object"),
        ({"messages": [{"content": "hi"}]}, "bad_prompt", "messages[0].role must be a string: it is null"),
        ({"messages": [{"role": "user"}]}, "bad_prompt", "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_prompt", "it is a number"),
        ({"messages": [USER, USER]}, "template_error", "refused the messages: roles must alternate"),
        ({"messages": [USER], "tools": {}}, "bad_prompt", "tools must be a list of objects"),
        ({"messages": [USER], "tools": ["f"]}, "bad_prompt", "tools must be a list of objects"),
        ({"messages": [USER], "chat_template_kwargs": 1}, "bad_prompt", "chat_template_kwargs must be an object"),
        ({"prompt_token_ids": []}, "empty_prompt", "prompt_token_ids is empty"),
        ({"prompt_token_ids": {}}, "bad_prompt", "must be a list of whole numbers: it is an object"),
        ({"prompt_token_ids": "1 2"}, "bad_prompt", "it is a string"),
        ({"prompt_token_ids": [1, 2.0]}, "bad_prompt", "prompt_token_ids[1] must be a whole number"),
        ({"prompt_token_ids": [True]}, "bad_prompt", "it is a boolean"),
        ({"prompt_token_ids": [-1]}, "bad_prompt", f"vocabulary is 0 to {VOCAB_SIZE - 1}"),
        ({"prompt_token_ids": [3, VOCAB_SIZE]}, "bad_prompt", f"prompt_token_ids[1] is {VOCAB_SIZE}"),
        ({"prompt_token_ids": [10**30]}, "bad_prompt", "vocabulary"),
        ({"prompt": "a\ud83db"}, "lone_surrogate", "U+D83D"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "lone_surrogate", "U+DC00"),
    ],
)
def test_what_cannot_be_a_prompt_is_an_error_naming_the_field(columns: dict[str, Any], code: str, says: str) -> None:
    error = refused(columns)
    assert error.code == code
    assert says in error.message


@pytest.mark.parametrize("row", [{"prompt": " "}, {"messages": [{"role": "user", "content": ""}]}])
def test_a_prompt_without_a_token_is_an_error(row: dict[str, Any]) -> None:
    """As a tokenizer without BOS can make of one; with it, the BOS is a start."""

    class Stripping(StubTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.removeprefix("user:").removesuffix("assistant: ").strip())[1:]

    with pytest.raises(RowError, match="the prompt has no tokens") as caught:
        encode(row, tokenizer=Stripping())
    assert caught.value.code == "empty_prompt"
    assert encode(row)[0] == BOS


def test_a_missing_named_column_lists_what_there_is() -> None:
    assert "no column 'question' (columns: a, b)" in refused({"a": 1, "b": 2}, "question").message
    assert refused({"question": None}, "question").code == "empty_prompt"


def test_text_in_parts_is_joined_and_other_parts_are_refused() -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    assert encode({"messages": [USER | {"content": parts}]}) == encode({"messages": [USER | {"content": "hi\nyou"}]})
    image = {"type": "image_url", "image_url": {"url": "x"}}
    error = refused({"messages": [USER | {"content": [parts[0], image]}]})
    assert (error.code, "messages[0].content[1]" in error.message, "image_url" in error.message) == (
        "bad_prompt",
        True,
        True,
    )


def test_a_chat_without_a_template_names_the_way_out() -> None:
    with pytest.raises(RowError, match="no chat template") as caught:
        encode({"messages": [USER]}, tokenizer=StubTokenizer(has_chat_template=False))
    assert caught.value.code == "no_chat_template"
    assert "instruct model" in caught.value.message


def fit(length: int, mode: Any, *, max_tokens: int | None = None, limit: int = 20) -> tuple[list[int], int]:
    ids = [BOS, *range(100, 100 + length - 1)]
    encoded = PromptEncoder(StubTokenizer(), limit, mode, CLOCK).encode(Rendered("token_ids", ids), max_tokens)
    return encoded.token_ids, encoded.num_dropped


@pytest.mark.parametrize("mode", ["error", "truncate-left", "truncate-right"])
def test_a_prompt_that_leaves_one_token_is_whole(mode: str) -> None:
    assert fit(19, mode) == ([BOS, *range(100, 118)], 0)
    assert fit(15, mode, max_tokens=5) == ([BOS, *range(100, 114)], 0)


def test_an_overlong_prompt_is_an_error_that_says_both_lengths() -> None:
    with pytest.raises(RowError, match="20 prompt tokens do not fit the context of 20") as caught:
        fit(20, "error")
    assert caught.value.code == "prompt_too_long"
    with pytest.raises(RowError, match="16 prompt tokens and max_tokens 5 do not fit"):
        fit(16, "error", max_tokens=5)


def test_truncating_keeps_bos_on_the_left_and_counts_what_was_dropped() -> None:
    assert fit(40, "truncate-left", max_tokens=10) == ([BOS, *range(130, 139)], 30)
    assert fit(40, "truncate-right", max_tokens=10) == ([BOS, *range(100, 109)], 30)


def test_truncating_without_max_tokens_leaves_a_quarter_for_the_completion() -> None:
    ids, dropped = fit(40, "truncate-right")
    assert (len(ids), dropped) == (15, 25)


def test_no_cut_makes_room_for_more_tokens_than_the_context_has() -> None:
    for policy in ("error", "truncate-left"):
        with pytest.raises(RowError, match="max_tokens 20 leaves the prompt no room in the context of 20: lower it"):
            fit(10, policy, max_tokens=20)


def test_different_prompts_differ_in_their_canonical_bytes() -> None:
    prompts = [
        Rendered("text", "[1]"),
        Rendered("token_ids", [1]),
        Rendered("chat", [USER]),
        Rendered("chat", [USER], [{"a": 1}]),
        Rendered("chat", [USER], None, {"a": 1}),
        Rendered("text", "[1] "),
    ]
    assert len({prompt.canonical() for prompt in prompts}) == len(prompts)
