"""From a row's columns to the prompt before tokenising: token ids, text, or a chat. Called by the feeder.

What is rendered here decides the row's key, so it needs no tokenizer: a resumed job recognises a finished row, and a
shard counts the rows before its own, without tokenising them. Leaves out tokenising (`prompts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from cbatch.compatibility import Facts, check
from cbatch.errors import RowError
from cbatch.io import jsonform
from cbatch.jobs.template import RowTemplate, list_names

TOKEN_IDS = "prompt_token_ids"
MESSAGES = "messages"
PROMPT = "prompt"
TOOLS = "tools"
TEMPLATE_KWARGS = "chat_template_kwargs"
ADD_GENERATION_PROMPT = "add_generation_prompt"
CONTINUE_FINAL_MESSAGE = "continue_final_message"
HOW_IT_ENDS = (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE)  # columns that say what is behind a chat

BAD_PROMPT = "bad_prompt"
EMPTY_PROMPT = "empty_prompt"
NO_PROMPT = "no_prompt"

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=repr)
_KINDS = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt before tokenising. `value` is a list of ids, a text, or a list of messages, as `kind` says."""

    kind: Literal["token_ids", "text", "chat"]
    value: Any
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] | None = None

    def canonical(self) -> bytes:
        """Return the bytes that two prompts have in common only if they are the same. RowError on a lone surrogate."""
        parts = [self.kind, self.value, self.tools, self.template_kwargs]
        try:
            return _ENCODER.encode(parts).encode()
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise RowError("lone_surrogate", f"the prompt holds half a character, U+{ord(lone):04X}") from None


class Renderer:
    """Finds and checks the prompt of a row."""

    def __init__(
        self, prompt_column: str | None = None, template: str | None = None, system_prompt: str | None = None
    ) -> None:
        """Raises UsageError for a template that is none, or beside a prompt column."""
        check(Facts(template=template is not None, prompt_column=prompt_column is not None))
        self._prompt_column = prompt_column
        self._template = RowTemplate(template) if template is not None else None
        self._system_prompt = system_prompt

    def render(self, columns: Mapping[str, Any]) -> Rendered:
        """Return the row's prompt: template or named column, else the first of ids, messages and text that is not null.

        Raises RowError that names the column and what it should hold.
        """
        rendered = self._render(columns)
        if self._system_prompt is None:
            return rendered
        if rendered.kind == "token_ids":
            raise RowError(BAD_PROMPT, f"--system-prompt cannot go before {TOKEN_IDS}")
        messages = rendered.value if rendered.kind == "chat" else [{"role": "user", "content": rendered.value}]
        if messages[0].get("role") != "system":  # a row's own system message wins
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        return Rendered("chat", messages, _tools(columns), _template_kwargs(columns))

    def _render(self, columns: Mapping[str, Any]) -> Rendered:
        if self._template is not None:
            return Rendered("text", _check_text(self._template.render(columns), "the template's text"))
        if self._prompt_column is not None:
            return self._render_named(columns, self._prompt_column)
        if columns.get(TOKEN_IDS) is not None:
            return Rendered("token_ids", _check_ids(columns[TOKEN_IDS]))
        if columns.get(MESSAGES) is not None:
            return _chat(columns, MESSAGES)
        if columns.get(PROMPT) is not None:
            return Rendered("text", _check_text(columns[PROMPT], PROMPT))
        null = next((name for name in (PROMPT, MESSAGES, TOKEN_IDS) if name in columns), None)
        if null is not None:
            raise RowError(EMPTY_PROMPT, f"{null} is null")
        raise RowError(
            NO_PROMPT,
            f"no prompt: the row has neither {PROMPT} nor {MESSAGES} nor {TOKEN_IDS} ({list_names(columns)}); "
            "--prompt-column names another",
        )

    def _render_named(self, columns: Mapping[str, Any], name: str) -> Rendered:
        if name not in columns:
            raise RowError(NO_PROMPT, f"no prompt: the row has no column '{name}' ({list_names(columns)})")
        if columns[name] is None:
            raise RowError(EMPTY_PROMPT, f"{name} is null")
        if _is_messages(columns[name]):
            return _chat(columns, name)
        return Rendered("text", _check_text(columns[name], name))


def _is_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _check_ids(value: object) -> list[int]:
    if not isinstance(value, list):
        raise RowError(BAD_PROMPT, f"{TOKEN_IDS} must be a list of whole numbers: it is {_describe(value)}")
    for position, token in enumerate(value):
        if type(token) is not int:
            raise RowError(BAD_PROMPT, f"{TOKEN_IDS}[{position}] must be a whole number: it is {_describe(token)}")
    if not value:
        raise RowError(EMPTY_PROMPT, f"{TOKEN_IDS} is empty")
    return value


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(BAD_PROMPT, f"{name} must be a string: it is {_describe(value)}{_other_column(value)}")
    if not value:
        raise RowError(EMPTY_PROMPT, f"{name} is an empty string")
    return value


def _chat(columns: Mapping[str, Any], name: str) -> Rendered:
    messages = columns[name]
    if not isinstance(messages, list):
        raise RowError(BAD_PROMPT, f"{name} must be a list of messages: it is {_describe(messages)}")
    if not messages:
        raise RowError(EMPTY_PROMPT, f"{name} is an empty list")
    messages = [_read_message(message, f"{name}[{number}]") for number, message in enumerate(messages)]
    return Rendered("chat", messages, _tools(columns), _template_kwargs(columns))


def _tools(columns: Mapping[str, Any]) -> list[Any] | None:
    tools = columns.get(TOOLS)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError(BAD_PROMPT, f"{TOOLS} must be a list of objects: it is {_describe(tools)}")
    return tools or None


def _template_kwargs(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the template is told: the column of that name, and what columns of their own say of the chat's end."""
    given = columns.get(TEMPLATE_KWARGS)
    if given is not None and not isinstance(given, dict):
        raise RowError(BAD_PROMPT, f"{TEMPLATE_KWARGS} must be an object: it is {_describe(given)}")
    # Null says nothing: tables put it where other rows have a value, and templates would take it for false.
    kwargs = {name: value for name, value in (given or {}).items() if value is not None}
    for name in HOW_IT_ENDS:
        wanted = columns.get(name)
        if wanted is None:
            continue
        if not isinstance(wanted, bool):
            raise RowError(BAD_PROMPT, f"{name} must be true or false: it is {_describe(wanted)}")
        if kwargs.setdefault(name, wanted) != wanted:
            raise RowError(BAD_PROMPT, f"{name} is {json.dumps(wanted)}, and {TEMPLATE_KWARGS} says otherwise")
    if all(kwargs.get(name) for name in HOW_IT_ENDS):
        raise RowError(BAD_PROMPT, f"{' and '.join(HOW_IT_ENDS)} exclude each other: leave one out")
    return kwargs or None


def _read_message(message: object, name: str) -> dict[str, Any]:
    """Return a checked message in the form that templates expect.

    Text that came in parts is joined by newlines; a tool call's arguments that came as JSON text are what it says. What
    says nothing (calls that are none, a call's lack of text or of arguments) has one form, since templates differ in
    what they make of null.
    """
    if not isinstance(message, dict):
        raise RowError(BAD_PROMPT, f"{name} must be an object with role and content: it is {_describe(message)}")
    if not isinstance(message.get("role"), str):
        raise RowError(BAD_PROMPT, f"{name}.role must be a string: it is {_describe(message.get('role'))}")
    content = message.get("content")
    if isinstance(message.get("tool_calls"), list):
        message = message | {"tool_calls": [_read_tool_call(call) for call in message["tool_calls"]]}
    if not message.get("tool_calls"):
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    elif content is None:
        return message | {"content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RowError(BAD_PROMPT, f"{name}.content must be a string or a list of parts: it is {_describe(content)}")
    for number, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise RowError(BAD_PROMPT, f"{name}.content[{number}] must be a text part: its type is {json.dumps(kind)}")
    return message | {"content": "\n".join(part["text"] for part in content)}


def _read_tool_call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = jsonform.load(arguments) if arguments.strip() else None
        except ValueError:  # a model's attempt, which the template shows as it is
            return call
    return call | {"function": function | {"arguments": {} if arguments is None else arguments}}


def _describe(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _other_column(value: object) -> str:
    if _is_messages(value):
        return f"; a chat goes into the column {MESSAGES}"
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return f"; token ids go into the column {TOKEN_IDS}"
    return ""
