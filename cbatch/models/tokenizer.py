"""Text to token ids and back, exactly as the model expects: one BOS, no EOS behind a prompt, no tidying of spaces.

Called by the jobs (prompts, on a thread of their own; results, on another) and by the engine for stop strings. Encoding
and decoding with a fast tokenizer change nothing in it, so threads may share it; it is never padded or truncated.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cbatch.errors import RowError
from cbatch.models.hub import loading
from cbatch.models.source import ModelSource

logger = logging.getLogger(__name__)

BAD_TEXT = "bad_text"
TEMPLATE_ERROR = "template_error"
UNKNOWN_TOKEN = "unknown_token"
PROBE = "a"
MAX_REASON = 300  # characters of what a template says; some errors repeat the whole chat
CLOCK_CALL = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")  # how templates print the time
# What a row may set of `apply_chat_template` itself; its other parameters decide how, not what, is rendered.
TEMPLATE_PARAMETERS = frozenset({"add_generation_prompt", "continue_final_message", "documents"})


def load_tokenizer(source: ModelSource, vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer of a model, or one named in its place. Raises UsageError."""
    with loading("the tokenizer", source):
        loaded = AutoTokenizer.from_pretrained(source.path, **source.arguments())
    return Tokenizer(loaded, vocab_size)


class Tokenizer:
    """A transformers tokenizer with the rules of this project; `vocab_size` is the model's where it is known.

    Changes the one that it is given: no padding, no truncation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._encode_plainly, self._decode = _backend(tokenizer)
        self.num_tokens = max(tokenizer.get_vocab().values()) + 1  # ids, holes included
        added = tokenizer.added_tokens_decoder.items()
        self._special_texts = {token_id: token.content for token_id, token in added if token.special}
        self._special_ids = {text: token_id for token_id, text in self._special_texts.items()}
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self._prefix, self._suffix = self._special_tokens_around()
        self._context = self._encode_plainly([PROBE], False)[0]
        self._context_text = self.decode(self._context)
        self._made_at = datetime.now()
        self._print_time = lru_cache(_print_time)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) - TEMPLATE_PARAMETERS
        self.vocab_size = vocab_size or self.num_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether rows can give messages."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._eos

    def encode(self, text: str) -> list[int]:
        """Encode a text with the tokenizer's own special tokens, BOS once, no EOS that the text does not have.

        Raises RowError for text that is not Unicode, and for tokens that the model does not have.
        """
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as `encode` does, in one call."""
        for text in texts:
            _check_unicode(text)
        return [self._check_vocabulary(self._trim(ids)) for ids in self._encode_plainly(texts, True)]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> list[int]:
        """Render messages with the model's template, the assistant's turn opened, and encode that as it stands.

        The time that a template prints is `now`, else that at which the tokenizer was loaded: it stands still, so that
        rows rendered later do not lose the shared prefix. Raises RowError where the template refuses them.
        """
        text = self._render(messages, tools, dict(chat_template_kwargs or {}), now or self._made_at)
        _check_unicode(text)
        return self._check_vocabulary(self._encode_plainly([text], False)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text; special tokens and ids beyond the tokenizer's vocabulary give nothing."""
        return self._decode([token for token in ids if token < self.num_tokens])

    def as_json(self) -> str | None:
        """Return a fast tokenizer as the tokenizers library writes it; None for a slow one."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return str(fast.to_str()) if isinstance(fast, tokenizers.Tokenizer) else None

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a text: a special one's name, "\ufffd" for a part of a character."""
        # Behind another one: of a text's first word decoders may drop the space.
        return self._special_texts.get(token_id) or self.decode([*self._context, token_id])[len(self._context_text) :]

    def special_token_id(self, text: str) -> int | None:
        """Return the special token that is written so; None where it is none, and decoding would show it."""
        return self._special_ids.get(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        given: dict[str, Any],
        now: datetime,
    ) -> str:
        if reserved := sorted(given.keys() & self._reserved):
            raise RowError(TEMPLATE_ERROR, f"chat_template_kwargs cannot set {', '.join(reserved)}")
        given.setdefault("add_generation_prompt", not given.get("continue_final_message", False))
        tool_dicts: list[Any] | None = None if tools is None else [dict(tool) for tool in tools]
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tool_dicts,
                chat_template=self._print_time(self._tokenizer.get_chat_template(tools=tool_dicts), now),
                tokenize=False,
                **given,
            )
        except Exception as error:  # a template is the model's code, and raises what it likes
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."
            raise RowError(TEMPLATE_ERROR, f"the chat template refused the messages: {reason}") from error
        assert isinstance(rendered, str)
        return rendered

    def _check_vocabulary(self, ids: list[int]) -> list[int]:
        """Refuse ids that the model has no embedding for, as a tokenizer with tokens of its own may give."""
        if self.num_tokens > self.vocab_size and max(ids, default=0) >= self.vocab_size:
            raise RowError(
                UNKNOWN_TOKEN,
                f"the tokenizer gives token {max(ids)}, and the model's vocabulary is 0 to {self.vocab_size - 1}: "
                "give the model's own with --tokenizer",
            )
        return ids

    def _trim(self, ids: list[int]) -> list[int]:
        """Take away an EOS that the tokenizer appended and a BOS that the text had already."""
        if self._suffix and ids[-len(self._suffix) :] == self._suffix:
            ids = ids[: -len(self._suffix)]
        added = len(self._prefix)
        if added and self._prefix[-1] == self._bos and ids[added : added + 1] == [self._bos]:
            ids = ids[:added] + ids[added + 1 :]
        return ids

    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """Find what the tokenizer puts before a text, and the EOS that it puts behind, if it does."""
        around, alone = self._encode_plainly([PROBE], True)[0], self._encode_plainly([PROBE], False)[0]
        for start in range(len(around) - len(alone) + 1):
            if around[start : start + len(alone)] == alone:
                suffix = around[start + len(alone) :]
                if self._eos is None or self._eos not in suffix:
                    suffix = []
                if suffix:
                    logger.warning("the tokenizer appends EOS to a text; prompts are used without it")
                return around[:start], suffix
        return [], []


def _print_time(template: str, now: datetime) -> str:
    """Write `now` into a template where it would print the time of each row."""
    return CLOCK_CALL.sub(lambda call: repr(now.strftime(call[2])), template)


_EncodeMany = Callable[[Sequence[str], bool], list[list[int]]]
_Decode = Callable[[list[int]], str]


def _backend(tokenizer: PreTrainedTokenizerBase) -> tuple[_EncodeMany, _Decode]:
    """Give (texts, add special tokens) → ids, and ids → text, past the wrapper where the tokenizer is a fast one."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(fast, tokenizers.Tokenizer):
        fast.no_truncation()
        fast.no_padding()

        def encode_fast(texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
            if len(texts) == 1:
                return [fast.encode(texts[0], add_special_tokens=add_special_tokens).ids]
            return [e.ids for e in fast.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

        return encode_fast, lambda ids: fast.decode(ids, skip_special_tokens=True)

    def encode_slow(texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [list(tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def decode_slow(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return encode_slow, decode_slow


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            BAD_TEXT, f"the text is not Unicode: a lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        ) from error
