"""From a rendered prompt to the token ids that the engine takes. Called by the feeder, on its own thread.

The tokenizer is any that has the methods of the protocol below; nothing here imports a model library.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from cbatch.config import DEFAULT_MAX_TOKENS
from cbatch.errors import RowError
from cbatch.jobs.rendering import BAD_PROMPT, EMPTY_PROMPT, TOKEN_IDS, Rendered

OnOverlong = Literal["error", "truncate-left", "truncate-right"]

PROMPT_TOO_LONG = "prompt_too_long"
NO_CHAT_TEMPLATE = "no_chat_template"
TEMPLATE_ERROR = "template_error"
TOKENIZER_ERROR = "tokenizer_error"
TEMPLATE_HINT = (
    "take an instruct model, or its tokenizer with --tokenizer; or give the text, in the column prompt or by --template"
)


class Tokenizer(Protocol):
    """What a job needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Encode text with the tokenizer's own special tokens, exactly one BOS."""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        now: datetime,
    ) -> list[int]:
        """Apply the chat template once, without a second BOS; a template that prints the time prints `now`."""

    def decode(self, ids: list[int]) -> str:
        """Decode without special tokens and without cleaning up spaces."""

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a text."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's token ids, and how many were cut off to fit the context."""

    token_ids: list[int]
    num_dropped: int = 0


class PromptEncoder:
    """Tokenises and checks prompts against the vocabulary and the context."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, on_overlong: OnOverlong, clock: datetime) -> None:
        """`clock` is the time in the prompts of templates that print it: one for the whole job."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._max_model_len = max_model_len
        self._on_overlong = on_overlong
        self._vocab_size = tokenizer.vocab_size
        self._prefix = tokenizer.encode("")  # BOS where the tokenizer has one; cutting must not cost it

    def encode(self, rendered: Rendered, max_tokens: int | None) -> Encoded:
        """Return the prompt's ids; `max_tokens` is the row's where one was given. Raises RowError."""
        if rendered.kind == "token_ids":
            ids = self._check_vocabulary(rendered.value)
        elif rendered.kind == "text":
            ids = self._encode_text(rendered.value)
        else:
            ids = self._encode_chat(rendered)
        if not ids:
            raise RowError(EMPTY_PROMPT, "the prompt has no tokens")
        return self._fit(ids, max_tokens)

    def _check_vocabulary(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if not 0 <= token < self._vocab_size:
                raise RowError(
                    BAD_PROMPT,
                    f"{TOKEN_IDS}[{position}] is {token}: the model's vocabulary is 0 to {self._vocab_size - 1}",
                )
        return ids

    def _encode_text(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except RowError:
            raise
        except Exception as error:
            raise RowError(TOKENIZER_ERROR, f"the tokenizer refused the prompt: {_quote(error)}") from error

    def _encode_chat(self, rendered: Rendered) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise RowError(NO_CHAT_TEMPLATE, f"the model has no chat template for messages: {TEMPLATE_HINT}")
        try:
            return self._tokenizer.encode_chat(
                rendered.value,
                tools=rendered.tools,
                chat_template_kwargs=rendered.template_kwargs,
                now=self._clock,
            )
        except RowError:
            raise
        except Exception as error:  # a template runs arbitrary code, and raises whatever that does
            raise RowError(TEMPLATE_ERROR, f"the chat template refused the messages: {_quote(error)}") from error

    def _fit(self, ids: list[int], max_tokens: int | None) -> Encoded:
        """Refuse or cut a prompt that leaves no room for its completion."""
        limit = self._max_model_len
        if len(ids) + (1 if max_tokens is None else max_tokens) <= limit:
            return Encoded(ids)
        if (max_tokens or 0) >= limit:
            raise RowError(
                PROMPT_TOO_LONG,
                f"max_tokens {max_tokens} leaves the prompt no room in the context of {limit}: lower it",
            )
        if self._on_overlong == "error":
            completion = "" if max_tokens is None else f" and max_tokens {max_tokens}"
            raise RowError(
                PROMPT_TOO_LONG,
                f"{len(ids)} prompt tokens{completion} do not fit the context of {limit}: shorten it, or cut it with "
                "--on-overlong truncate-left or truncate-right",
            )
        room = limit - (min(DEFAULT_MAX_TOKENS, limit // 4 or 1) if max_tokens is None else max_tokens)
        return Encoded(self._cut(ids, room), len(ids) - room)

    def _cut(self, ids: list[int], room: int) -> list[int]:
        if self._on_overlong == "truncate-right":
            return ids[:room]
        kept = self._prefix if ids[: len(self._prefix)] == self._prefix and len(self._prefix) < room else []
        return kept + ids[len(ids) - room + len(kept) :]


def _quote(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
