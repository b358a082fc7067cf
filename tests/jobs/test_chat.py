"""Chats from a row's columns to token ids, through templates as models have them: applied once, one BOS."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from cbatch.errors import RowError
from cbatch.jobs.openai import BatchRequests
from cbatch.jobs.params import ParamReader
from cbatch.jobs.prompts import PromptEncoder
from cbatch.jobs.rendering import Rendered, Renderer
from cbatch.models.tokenizer import Tokenizer
from tests.tiny_models import BOS_ID, VOCAB_SIZE, build_tiny_tokenizer

USER = {"role": "user", "content": "the sand"}
CLOCK = datetime(2030, 1, 2)
ASSISTANT = {"role": "assistant", "content": "Once"}
SYSTEM = {"role": "system", "content": "be short"}
WRITES_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
WRITES_BOS += "{% if add_generation_prompt %}[assistant] {% endif %}"
# As Gemma's: no system role, and users and assistants in turn.
STRICT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
# As those of models that call tools: arguments are an object, which the template spells.
CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def tokenizer(template: str | None = WRITES_BOS) -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer(chat_template=template), VOCAB_SIZE)


def ids_of(rendered: Rendered, template: str | None) -> list[int]:
    return PromptEncoder(tokenizer(template), 512, "error", CLOCK).encode(rendered, None).token_ids


def render(columns: dict[str, Any], template: str | None = WRITES_BOS, renderer: Renderer | None = None) -> str:
    """The text of a row's prompt, special tokens left out."""
    return tokenizer().decode(ids_of((renderer or Renderer()).render(columns), template))


def refusal(columns: dict[str, Any], template: str | None = WRITES_BOS) -> RowError:
    def encode() -> None:
        rendered = Renderer().render(columns)
        rendered.canonical()
        ids_of(rendered, template)

    with pytest.raises(RowError) as caught:
        encode()
    return caught.value


@pytest.mark.parametrize("template", [WRITES_BOS, STRICT, WRITES_BOS.replace("{{ bos_token }}", "<s>")])
def test_a_chat_has_one_bos_and_the_ids_of_transformers(template: str) -> None:
    ids = ids_of(Renderer().render({"messages": [USER]}), template)
    reference = build_tiny_tokenizer(chat_template=template)
    assert ids == reference.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert (ids.count(BOS_ID), ids[0]) == (1, BOS_ID)


def test_the_template_is_applied_once_whatever_the_text_looks_like() -> None:
    written = render({"messages": [USER]})
    assert written == "[user] the sand\n[assistant] "
    assert render({"messages": [USER | {"content": written}]}) == f"[user] {written}\n[assistant] "


def test_a_chat_that_ends_with_the_assistant_gets_a_new_turn_unless_it_is_to_be_continued() -> None:
    chat = {"messages": [USER, ASSISTANT]}
    assert render(chat) == "[user] the sand\n[assistant] Once\n[assistant] "
    assert render(chat | {"continue_final_message": True}) == "[user] the sand\n[assistant] Once"
    assert render(chat | {"continue_final_message": False}) == render(chat)
    assert render(chat | {"add_generation_prompt": False}) == "[user] the sand\n[assistant] Once\n"
    assert render(chat | {"add_generation_prompt": True}) == render(chat)


def test_the_words_for_a_chats_end_may_stand_among_the_templates_arguments() -> None:
    chat = {"messages": [USER, ASSISTANT]}
    row = chat | {"continue_final_message": True}
    assert render(chat | {"chat_template_kwargs": {"continue_final_message": True}}) == render(row)
    assert render(row | {"chat_template_kwargs": {"continue_final_message": True}}) == render(row)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (
            {"continue_final_message": True, "chat_template_kwargs": {"add_generation_prompt": True}},
            "exclude each other",
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": True, "continue_final_message": True}}, "exclude"),
        ({"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}}, "says otherwise"),
        ({"continue_final_message": "true"}, "continue_final_message must be true or false: it is a string"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be true or false: it is a number"),
    ],
)
def test_contradictions_about_a_chats_end_are_the_rows_error(columns: dict[str, Any], says: str) -> None:
    error = refusal({"messages": [USER, ASSISTANT], **columns})
    assert error.code == "bad_prompt"
    assert says in error.message


def test_how_a_chat_ends_is_part_of_the_rows_key() -> None:
    chat = {"messages": [USER, ASSISTANT]}
    ends = [{}, {"continue_final_message": True}, {"add_generation_prompt": False}]
    assert len({Renderer().render(chat | end).canonical() for end in ends}) == 3


def test_a_system_prompt_before_a_text_leaves_the_rows_words_for_the_template() -> None:
    row = {"prompt": "the sand", "chat_template_kwargs": {"mood": "calm"}, "tools": [TOOL]}
    written = render(row, CALLS + "{{ mood }}", Renderer(system_prompt="be short"))
    assert '"look"' in written
    assert written.endswith("[system] be short\n[user] the sand\ncalm")


def test_tools_are_passed_through_and_calls_reach_the_template_as_objects() -> None:
    def call(arguments: object) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    answer = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "far"}]}
    texts = [
        render({"messages": [USER, call(arguments), answer], "tools": [TOOL]}, CALLS)
        for arguments in ({"where": "é"}, '{"where": "é"}')
    ]
    assert texts[0] == texts[1]
    assert 'look({"where": "é"})\n[tool] far' in texts[0]
    assert texts[0].startswith('{"type": "function", "function": {"name": "look"')
    # What a model wrote that is no JSON is shown as it is.
    assert "look(" + '"{torn"' in render({"messages": [USER, call("{torn"), answer]}, CALLS)


# As Llama 3.1's ask whether there are calls, Qwen 3's go through the arguments, and older ones add texts.
ASKS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{{ '[' + m.role + '] ' + m.content }}"
    "{% for name, value in m.tool_calls[0].function.arguments.items() %}{{ name }}={{ value }}{% endfor %}()\n"
    "{% else %}{{ '[' + m.role + '] ' + m.content + '\n' }}{% endif %}{% endfor %}"
)


def test_null_among_the_templates_arguments_is_not_given() -> None:
    template = WRITES_BOS + "{% if mood is defined %}{{ mood }}{% endif %}"
    nothing = {"mood": None, "add_generation_prompt": None, "continue_final_message": None}
    assert render({"messages": [USER], "chat_template_kwargs": nothing}, template) == render({"messages": [USER]})


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_a_message_without_calls_is_one_whatever_it_says_of_them(calls: dict[str, Any]) -> None:
    assert render({"messages": [USER, ASSISTANT | calls]}, ASKS) == "[user] the sand\n[assistant] Once\n"


@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "null"}])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_call_lacks_text_and_arguments_in_one_way(function: dict[str, Any], content: dict[str, Any]) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look"} | function}]}
    assert render({"messages": [USER, call | content]}, ASKS) == "[user] the sand\n[assistant] ()\n"
    assert render({"messages": [USER, call | content]}, CALLS) == "[user] the sand\n[assistant] look({})\n"


def test_arguments_nested_beyond_measure_are_shown_as_they_are() -> None:
    deep = "[" * 5000 + "]" * 5000
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": deep}}]}
    rendered = Renderer().render({"messages": [USER, call]})
    assert rendered.value[1]["tool_calls"][0]["function"]["arguments"] == deep
    assert rendered.canonical()


def test_any_role_is_the_templates_to_take_or_refuse() -> None:
    developer = {"role": "developer", "content": "be short"}
    assert render({"messages": [developer, USER]}).startswith("[developer] be short\n")
    assert "roles must alternate" in refusal({"messages": [developer, USER]}, STRICT).message


@pytest.mark.parametrize(
    ("messages", "code", "says"),
    [
        ([SYSTEM, USER], "template_error", "System role not supported"),
        ([USER, USER], "template_error", "must alternate"),
        ([ASSISTANT, USER], "template_error", "must alternate"),
        ([USER | {"role": "wizard"}], "template_error", "must alternate"),
        ([], "empty_prompt", "messages is an empty list"),
        ([USER | {"content": None}], "bad_prompt", "messages[0].content must be a string"),
    ],
)
def test_what_a_strict_template_refuses_is_the_rows_error_in_its_own_words(
    messages: list[Any], code: str, says: str
) -> None:
    error = refusal({"messages": messages}, STRICT)
    assert error.code == code
    assert says in error.message
    assert render({"messages": [USER, ASSISTANT]}, STRICT) == "[user] the sand\n[assistant] Once\n[assistant] "


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [USER | {"content": "\udc4d"}]},
        {"messages": [USER | {"content": [{"type": "text", "text": "\udc4d"}]}]},
        {"messages": [USER | {"name": "\udc4d"}]},
        {"messages": [USER], "tools": [{"name": "\udc4d"}]},
        {"messages": [USER], "chat_template_kwargs": {"mood": "\udc4d"}},
    ],
)
def test_half_a_character_anywhere_in_a_chat_is_the_rows_error(columns: dict[str, Any]) -> None:
    error = refusal(columns)
    assert error.code == "lone_surrogate"
    assert "U+DC4D" in error.message


def test_without_a_template_the_error_names_every_way_out() -> None:
    error = refusal({"messages": [USER]}, None)
    assert error.code == "no_chat_template"
    for way in ("instruct model", "--tokenizer", "column prompt", "--template"):
        assert way in error.message
    by_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    assert render({"messages": [USER]}, None, Renderer(template=by_template)) == "user: the sand\nassistant:"


def test_a_batch_file_says_the_same_of_a_chats_end() -> None:
    body = {"model": "m", "messages": [USER, ASSISTANT], "add_generation_prompt": False, "continue_final_message": True}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    _, rendered = BatchRequests(ParamReader({})).interpret(request)
    assert tokenizer().decode(ids_of(rendered, WRITES_BOS)) == "[user] the sand\n[assistant] Once"
