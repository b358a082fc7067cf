"""The OpenAI Batch format: a request line in, a response line out. Called by the reader and at the end of a job.

A file of `custom_id`, `method`, `url` and `body` is recognised by its first row. Requests for chat and text completions
are run; what a body asks for beyond what works is that request's error, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cbatch.errors import RowError
from cbatch.jobs.journal import Entry
from cbatch.jobs.params import ParamReader
from cbatch.jobs.rendering import (
    HOW_IT_ENDS,
    MESSAGES,
    PROMPT,
    TEMPLATE_KWARGS,
    TOKEN_IDS,
    TOOLS,
    Rendered,
    Renderer,
)
from cbatch.jobs.results import SAMPLES

CUSTOM_ID = "custom_id"
FIELDS = (CUSTOM_ID, "method", "url", "body")
CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
BAD_REQUEST = "invalid_request"
RESPONSE_FORMAT = "response_format"
TOP_LOGPROBS = "top_logprobs"  # of a chat, beside "logprobs": true
TOOL_CHOICE = "tool_choice"
NO_TOOL = "none"  # no call is wanted: the prompt says nothing of tools

# Fields of a body that say nothing about the completion, or only in other values than these.
_NO_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
_ONLY: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stream_options": (),
    TOOL_CHOICE: ("auto", NO_TOOL),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_OTHER_NAMES = {"max_completion_tokens": "max_tokens"}
_CHAT_FIELDS = (MESSAGES, TOOLS, TEMPLATE_KWARGS, *HOW_IT_ENDS)
_PROMPT_FIELDS = frozenset({PROMPT, *_CHAT_FIELDS})


def is_batch_row(columns: Mapping[str, Any]) -> bool:
    """Whether a row is a request of an OpenAI Batch file, be it one that lacks a field or has a wrong one."""
    if any(name in columns for name in (PROMPT, MESSAGES, TOKEN_IDS)):
        return False
    is_meant = CUSTOM_ID in columns or columns.get("url") in (CHAT_URL, TEXT_URL)
    return is_meant and sum(name in columns for name in FIELDS) >= len(FIELDS) - 1


class BatchRequests:
    """Reads the requests of an OpenAI Batch file."""

    def __init__(self, params: ParamReader, system_prompt: str | None = None) -> None:
        self._params = params
        self._renderer = Renderer(system_prompt=system_prompt)

    def interpret(self, columns: Mapping[str, Any]) -> tuple[dict[str, object], Rendered]:
        """Return a request's parameters and prompt. Raises RowError that names the field."""
        body, url = columns.get("body"), columns.get("url")
        custom_id = columns.get(CUSTOM_ID)
        if not isinstance(custom_id, str) or not custom_id:
            raise RowError(BAD_REQUEST, f"{CUSTOM_ID} must be a string that is not empty")
        if columns.get("method") != "POST":
            raise RowError(BAD_REQUEST, "method must be POST")
        if url not in (CHAT_URL, TEXT_URL):
            raise RowError(BAD_REQUEST, f"url must be {CHAT_URL} or {TEXT_URL}: it is {str(url)[:60]!r}")
        if not isinstance(body, dict):
            raise RowError(BAD_REQUEST, "body must be an object")
        return self._params.read(self._parameters(body, url)), self._renderer.render(_prompt(body, url))

    def _parameters(self, body: Mapping[str, Any], url: object) -> dict[str, Any]:
        """The parameters under our names; whatever else is no part of the prompt must change nothing."""
        parameters: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or name in _PROMPT_FIELDS or name in _NO_EFFECT:
                continue
            if (name == TOP_LOGPROBS and url == CHAT_URL) or name == RESPONSE_FORMAT:
                continue
            ours = _OTHER_NAMES.get(name, name)
            if name not in _ONLY and self._params.meaning_of(ours) is not None:
                if parameters.setdefault(ours, value) != value:
                    raise RowError(BAD_REQUEST, f"body gives {ours} two values, under two names: leave one out")
            elif not any(type(value) is type(only) and value == only for only in _ONLY.get(name, ())):
                raise RowError(BAD_REQUEST, f"body.{name} is not supported by this version")
        if url == CHAT_URL and body.get(TOP_LOGPROBS):
            if body.get("logprobs") is not True:
                raise RowError(BAD_REQUEST, f"body.{TOP_LOGPROBS} needs logprobs to be true")
            parameters["logprobs"] = body[TOP_LOGPROBS]
        structure = _structure(body.get(RESPONSE_FORMAT))
        if twice := next((name for name in structure if name in parameters), None):
            raise RowError(BAD_REQUEST, f"body.{twice} and {RESPONSE_FORMAT} cannot both be followed: leave one out")
        return parameters | structure


def _structure(wanted: object) -> dict[str, Any]:
    """Our parameters for a `response_format`."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    described = wanted.get("json_schema") if isinstance(wanted, dict) else None
    if kind == "json_schema" and isinstance(described, dict) and isinstance(described.get("schema"), dict):
        return {"json_schema": described["schema"]}
    raise RowError(
        BAD_REQUEST, f"body.{RESPONSE_FORMAT} must be of type text, json_object or json_schema with a schema"
    )


def _prompt(body: Mapping[str, Any], url: object) -> dict[str, Any]:
    """The columns that the renderer knows."""
    if url == CHAT_URL:
        if body.get(MESSAGES) is None:
            raise RowError(BAD_REQUEST, f"body has no {MESSAGES}")
        fields = {name: body.get(name) for name in _CHAT_FIELDS}
        return fields | ({TOOLS: None} if body.get(TOOL_CHOICE) == NO_TOOL else {})
    prompt = body.get(PROMPT)
    if prompt is None:
        raise RowError(BAD_REQUEST, f"body has no {PROMPT}")
    if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:  # a list of one prompt
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {TOKEN_IDS: prompt}
    return {PROMPT: prompt}


def to_response(entry: Entry) -> tuple[dict[str, Any], bool]:
    """Return the response line of a request, and whether it belongs into the error file."""
    error = entry.result.get("error")
    line: dict[str, Any] = {
        "id": f"batch_req_{entry.head.key.hex()}",
        CUSTOM_ID: entry.columns.get(CUSTOM_ID),
        "response": None,
        "error": error,
    }
    if error is None:
        line["response"] = {
            "status_code": 200,
            "request_id": f"req_{entry.head.key.hex()}",
            "body": _completion(entry),
        }
    return line, error is not None


def _completion(entry: Entry) -> dict[str, Any]:
    body, result = entry.columns["body"], entry.result
    is_chat = entry.columns["url"] == CHAT_URL
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{entry.head.key.hex()}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(datetime.fromisoformat(result["scheduled_at"]).timestamp()),
        "model": body.get("model") or "",
        "choices": [_choice(i, sample, is_chat=is_chat) for i, sample in enumerate(result.get(SAMPLES) or [result])],
        "usage": {
            "prompt_tokens": result["prompt_tokens"],
            "completion_tokens": result["completion_tokens"],
            "total_tokens": result["prompt_tokens"] + result["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": result["cached_tokens"]},
        },
        # Not in the public format, and there only where asked for.
        **{name: result[name] for name in ("prompt_token_logprobs", "prompt_top_logprobs") if name in result},
    }


def _choice(index: int, sample: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": sample["finish_reason"]}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": sample["completion"], "refusal": None}
    else:
        choice["text"] = sample["completion"]
    if sample.get("token_logprobs") is not None:
        choice["logprobs"] = _chat_logprobs(sample) if is_chat else _text_logprobs(sample)
    return choice


def _chat_logprobs(sample: Mapping[str, Any]) -> dict[str, Any]:
    top = sample.get(TOP_LOGPROBS) or [[]] * len(sample["tokens"])
    content = [
        _scored(token, logprob) | {TOP_LOGPROBS: [_scored(entry["token"], entry["logprob"]) for entry in entries]}
        for token, logprob, entries in zip(sample["tokens"], sample["token_logprobs"], top, strict=True)
    ]
    return {"content": content, "refusal": None}


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}


def _text_logprobs(sample: Mapping[str, Any]) -> dict[str, Any]:
    top = sample.get(TOP_LOGPROBS)
    return {
        "tokens": sample["tokens"],
        "token_logprobs": sample["token_logprobs"],
        TOP_LOGPROBS: top and [_by_text(entries) for entries in top],
    }


def _by_text(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name tokens by their texts, best first; of those that share one, parts of characters say, the likeliest."""
    scores: dict[str, float] = {}
    for entry in entries:
        scores.setdefault(entry["token"], entry["logprob"])
    return scores
