"""When a request has said enough: EOS, stop tokens, stop strings, the token limit.

Until `min_tokens` are there nothing but the limit ends it: the sampler forbids the tokens that would, and a stop string
counts only where it ends in the text that comes after them.

Stop strings are looked for in the detokenised text, since they may begin and end inside tokens. The prompt's text
never takes part. Text is decoded in a sliding window of tokens whose text is complete, so that a step costs a few
tokens however long the completion is; multi-byte characters still in the making are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

REPLACEMENT = "\ufffd"  # what decoders give for bytes that are no character yet
MAX_PENDING_TOKENS = 16  # more tokens than any character has bytes: what is no text by then never will be


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a request ended, and where its text does (None: at its end)."""

    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    text_length: int | None = None  # characters
    num_text_tokens: int | None = None  # the generated tokens that make the text
    text_suffix: str = ""  # put behind it: the special token that ended it, where it was asked for


class StopStrings:
    """Looks for stop strings in the text of one completion, fed token by token."""

    def __init__(self, stop: tuple[str, ...], decode: Callable[[Sequence[int]], str], *, include: bool = False) -> None:
        """`include` leaves the stop string in the text."""
        self._stop = stop
        self._decode = decode
        self._include = include
        self._num_ignored = 0  # tokens in whose text stop strings do not count
        self._token_ids: list[int] = []
        self._window: list[int] = []  # tokens whose text may still change, after one settled group
        self._num_settled = 0  # tokens at the window's start that only give the others their context
        self._tail = ""  # the end of the settled text, where a stop string may have begun
        self._max_tail = max(map(len, stop)) - 1

    def feed(self, token_id: int, *, counts: bool = True) -> Stop | None:
        """Take one more token; return the earliest stop string that the text now holds, if any.

        One that ends in text of tokens that do not count is none.
        """
        self._token_ids.append(token_id)
        self._window.append(token_id)
        context = self._decode(self._window[: self._num_settled])
        text = self._decode(self._window)
        new = text[len(context) :]
        searched = self._tail + new.rstrip(REPLACEMENT)
        is_pending = text.endswith(REPLACEMENT) and len(self._window) - self._num_settled < MAX_PENDING_TOKENS
        if not is_pending:
            self._settle(context, new)
        if not counts:
            self._num_ignored = len(self._token_ids)
            return None
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
        ignored = self._ignored_length()
        starts = ((text.find(stop, max(0, ignored - len(stop) + 1)), stop) for stop in self._stop)
        found = [(at, stop) for at, stop in starts if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        return Stop("stop", stop_reason=stop, text_length=at + len(stop) if self._include else at)

    def _ignored_length(self) -> int:
        """Count the characters in which stop strings do not count; a character in the making can hide earlier ones."""
        ends = range(max(0, self._num_ignored - MAX_PENDING_TOKENS), self._num_ignored + 1)
        return max(len(self._decode(self._token_ids[:end]).rstrip(REPLACEMENT)) for end in ends)


@dataclass(slots=True, eq=False)
class StopCondition:
    """The conditions of one request."""

    eos_token_ids: frozenset[int]  # empty where EOS is ignored
    strings: StopStrings | None
    stop_tokens: Mapping[int, int | str] = field(default_factory=dict)  # token → what was asked for: it, or its text
    include: bool = False  # whether the stop token's text is part of the completion's
    min_tokens: int = 0

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The tokens that end the request."""
        return self.eos_token_ids.union(self.stop_tokens)

    def check(self, token_id: int, num_generated: int, max_tokens: int) -> Stop | None:
        """Tell whether the request ends with `token_id`, its `num_generated`-th token."""
        if token_id in self.stop_tokens:
            return self._end_with(self.stop_tokens[token_id], num_generated)
        if token_id in self.eos_token_ids:
            return Stop("stop", num_text_tokens=num_generated - 1)
        counts = num_generated > self.min_tokens
        if self.strings is not None and (stop := self.strings.feed(token_id, counts=counts)) is not None:
            return stop
        return Stop("length") if num_generated >= max_tokens else None

    def _end_with(self, asked: int | str, num_generated: int) -> Stop:
        """End with a stop token: one given by its text is special, so that the text does not have it of itself."""
        if not self.include:
            return Stop("stop", asked, num_text_tokens=num_generated - 1)
        if isinstance(asked, str):
            return Stop("stop", asked, num_text_tokens=num_generated - 1, text_suffix=asked)
        return Stop("stop", asked)
