"""When a request has said enough: EOS, stop strings, the token limit.

Stop strings are looked for in the detokenised text, since they may begin and end inside tokens. The prompt's text
never takes part. Text is decoded in a sliding window of tokens whose text is complete, so that a step costs a few
tokens however long the completion is; multi-byte characters still in the making are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

REPLACEMENT = "\ufffd"  # what decoders give for bytes that are no character yet
MAX_PENDING_TOKENS = 16  # more tokens than any character has bytes: what is no text by then never will be


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a request ended, and where its text does (None: at its end)."""

    finish_reason: Literal["stop", "length"]
    stop_reason: str | None = None
    text_length: int | None = None


class StopStrings:
    """Looks for stop strings in the text of one completion, fed token by token."""

    def __init__(self, stop: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = stop
        self._decode = decode
        self._token_ids: list[int] = []
        self._window: list[int] = []  # tokens whose text may still change, after one settled group
        self._num_settled = 0  # tokens at the window's start that only give the others their context
        self._tail = ""  # the end of the settled text, where a stop string may have begun
        self._max_tail = max(map(len, stop)) - 1

    def feed(self, token_id: int) -> Stop | None:
        """Take one more token; return the earliest stop string that the text now holds, if any."""
        self._token_ids.append(token_id)
        self._window.append(token_id)
        context = self._decode(self._window[: self._num_settled])
        text = self._decode(self._window)
        new = text[len(context) :]
        searched = self._tail + new.rstrip(REPLACEMENT)
        is_pending = text.endswith(REPLACEMENT) and len(self._window) - self._num_settled < MAX_PENDING_TOKENS
        if not is_pending:
            self._settle(context, new)
        return self._locate() if any(stop in searched for stop in self._stop) else None

    def _settle(self, context: str, new: str) -> None:
        """Move the window past tokens whose text is complete."""
        text = self._tail + new
        self._tail = text[max(0, len(text) - self._max_tail) :]
        if new:
            del self._window[: self._num_settled]
        elif context or len(self._window) > MAX_PENDING_TOKENS:
            # Tokens without text, special ones say, are no context: a decoder that drops a text's first space
            # would drop the next token's.
            del self._window[self._num_settled :]
        self._num_settled = len(self._window)

    def _locate(self) -> Stop | None:
        """Cut the whole completion's text, once: that is what the caller writes, and bytes can change it afar."""
        text = self._decode(self._token_ids)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        return Stop("stop", stop_reason=stop, text_length=at)


@dataclass(slots=True, eq=False)
class StopCondition:
    """The conditions of one request."""

    eos_token_ids: frozenset[int]  # empty where EOS is ignored
    strings: StopStrings | None

    def check(self, token_id: int, num_generated: int, max_tokens: int) -> Stop | None:
        """Tell whether the request ends with `token_id`, its `num_generated`-th token."""
        if token_id in self.eos_token_ids:
            return Stop("stop")
        if self.strings is not None and (stop := self.strings.feed(token_id)) is not None:
            return stop
        return Stop("length") if num_generated >= max_tokens else None
