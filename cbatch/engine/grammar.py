"""Structured output: a completion that follows a JSON schema, a regular expression or a list of choices.

A `Constraint` goes with one request and says which tokens may come next; `Grammars` makes them for one tokenizer and
keeps what it compiled. A step's masks are filled on a thread of their own while the model computes. The grammars are
llguidance's (an extra of this package, imported where the first one is asked for).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cbatch.config import SamplingParams
from cbatch.errors import RowError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INSTALL_HINT = "pip install 'cbatch[structured]'"
MAX_COMPILED = 256  # grammars
WHITESPACE = (
    r"[ \n]{0,16}"  # between the parts of a JSON text; unbounded, a model can write nothing else until it is cut
)

Masks = npt.NDArray[np.uint8]  # [rows, ceil(tokens / 8)], a bit a token, the lowest first


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which tokens may come next, row by row."""

    masks: Masks
    errors: list[RowError | None]  # why none can be found, where a grammar is too complex for its limits


def is_installed() -> bool:
    """Tell whether structured output works here."""
    return find_spec("llguidance") is not None


def is_structured(params: SamplingParams) -> bool:
    """Tell whether a request asks for structured output."""
    return params.json_schema is not None or params.json_object or params.regex is not None or bool(params.choice)


class Constraint:
    """What one request may say next."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher) -> None:
        self.grammars = grammars
        self.matcher = matcher
        self._num_seen = 0

    def catch_up(self, generated: Sequence[int]) -> None:
        """Take the tokens that were generated since; `generated` are all so far."""
        self.matcher.consume_tokens(list(generated[self._num_seen :]))
        self._num_seen = len(generated)


class Grammars:
    """Compiles the grammars of one tokenizer's requests."""

    def __init__(
        self, tokenizer_json: Callable[[], str | None], num_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`tokenizer_json` gives None for a tokenizer without such a form; `num_tokens` are those that may come."""
        self._tokenizer_json = tokenizer_json
        self._num_tokens = num_tokens
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, "cbatch-grammars")
        self._compile = lru_cache(MAX_COMPILED)(self._compile_anew)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Make the constraint of a request, None where it asks for none. Raises RowError for what does not compile."""
        if not is_structured(params):
            return None
        if not is_installed():
            raise RowError("missing_package", f"structured output needs llguidance: {INSTALL_HINT}")
        if params.json_schema is not None:
            matcher = self._compile("json_schema", params.json_schema)
        elif params.json_object:
            matcher = self._compile("json_object", '{"type": "object"}')
        elif params.regex is not None:
            matcher = self._compile("regex", params.regex)
        else:
            matcher = self._compile("choice", " | ".join(json.dumps(choice) for choice in params.choice))
        return Constraint(self, matcher.deep_copy())

    def start_masks(self, asked: Sequence[tuple[Constraint, tuple[int, ...]]]) -> Future[Allowed]:
        """Begin to find the tokens that may come next, each behind some drafts.

        The rows of a request come one after another, each with one draft more than the one before.
        """
        return self._thread.submit(self._fill, asked)

    def _fill(self, asked: Sequence[tuple[Constraint, tuple[int, ...]]]) -> Allowed:
        masks = np.full((len(asked), -(-self._num_tokens // 8)), 255, dtype=np.uint8)
        errors: list[RowError | None] = []
        for row, (constraint, drafts) in enumerate(asked):
            if not drafts:
                matcher = constraint.matcher
            else:
                matcher = matcher.deep_copy() if len(drafts) == 1 else matcher
                matcher.consume_token(drafts[-1])
            filled = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if not matcher.is_error():
                masks[row] = filled[: masks.shape[1]]
            errors.append(_failure(matcher) if matcher.is_error() else None)
        return Allowed(masks, errors)

    def _compile_anew(self, kind: str, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            if kind in ("json_schema", "json_object"):
                grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                # A terminal, which like a regular expression has any number of alternatives; a rule has few.
                grammar = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {text}")
        except ValueError as error:
            raise RowError("bad_grammar", f"{kind} does not compile: {error}") from None
        matcher = LLMatcher(self._ready_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise RowError("bad_grammar", f"{kind} does not compile: {_first_line(matcher)}")
        return matcher

    def _ready_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            text = self._tokenizer_json()
            if text is None or not self._eos_token_ids:
                raise RowError("no_grammars", "structured output needs a fast tokenizer and a model with an end token")
            self._tokenizer = LLTokenizer(text, n_vocab=self._num_tokens, eos_token=self._eos_token_ids)
        return self._tokenizer


def _failure(matcher: LLMatcher) -> RowError:
    return RowError("grammar_failed", f"the grammar cannot be followed further: {_first_line(matcher)}")


def _first_line(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:200]
