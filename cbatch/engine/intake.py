"""From a prompt to the request that is queued: limits checked, stopping and sampling made ready. Called by the engine.

What can never work is refused here, at once, and for this prompt alone.
"""

from __future__ import annotations

import time
from contextlib import suppress

from cbatch.config import DEFAULT_MAX_TOKENS, SamplingParams
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.grammar import Grammars, is_structured
from cbatch.engine.history import TokenHistory
from cbatch.engine.record import LogprobRecord
from cbatch.engine.request import Prompt, Request
from cbatch.engine.stopping import StopCondition, StopStrings
from cbatch.errors import RowError
from cbatch.models.tokenizer import Tokenizer


class Intake:
    """Makes the requests of one engine."""

    def __init__(
        self,
        cache: CacheManager,
        max_model_len: int,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        grammars: Grammars,
    ) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._grammars = grammars

    def prepare(self, params: SamplingParams) -> None:
        """Compile what requests of this kind need, so that no step waits for it; what fails does so for the request."""
        with suppress(RowError):
            self._grammars.constraint(params)

    def requests(self, prompt: Prompt) -> list[Request]:
        """Make a prompt's requests, one a sample. Raises RowError where it, or what it asks for, can never work."""
        params = prompt.sampling
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        max_tokens, now = self._max_tokens(prompt), time.perf_counter()
        return [
            Request(
                prompt=prompt,
                max_tokens=max_tokens,
                created_at=now,
                stopping=self._stopping(params),
                token_ids=list(prompt.token_ids),
                tables=self._cache.make_tables(),
                sample=sample,
                history=_history(prompt),
                logprobs=_record(params, sample),
                constraint=self._grammars.constraint(params),
            )
            for sample in range(params.n)
        ]

    def _max_tokens(self, prompt: Prompt) -> int:
        """Decide how many tokens a prompt may get."""
        num_prompt, asked = len(prompt.token_ids), prompt.sampling.max_tokens
        context = self._max_model_len
        if num_prompt > context or (num_prompt == context and asked != 0):
            raise RowError(
                "prompt_too_long",
                f"the prompt has {num_prompt} tokens, and a context of {context} leaves no room for a completion; "
                "see --on-overlong",
            )
        wanted = min(DEFAULT_MAX_TOKENS, context - num_prompt) if asked is None else asked
        if num_prompt + wanted > context:
            raise RowError(
                "context_exceeded",
                f"{num_prompt} prompt tokens and max_tokens {wanted} exceed the context of {context}; "
                f"at most {context - num_prompt} are left",
            )
        # The last token is never read again, so its KV is never stored.
        room = self._cache.max_tokens_ever + 1 - num_prompt
        if max(wanted, 1) > room and (asked is not None or room < 1):
            raise RowError(
                "cache_exceeded",
                f"{num_prompt} prompt tokens and max_tokens {wanted} can never fit in a KV cache of "
                f"{self._cache.max_tokens_ever} tokens; raise num_blocks or lower max_tokens",
            )
        return min(wanted, room)

    def _check_token_ids(self, name: str, token_ids: list[int] | tuple[int, ...]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise RowError(
                    "bad_parameter",
                    f"{name} names token {token_id}: the model's vocabulary is 0 to {self._tokenizer.vocab_size - 1}",
                )

    def _check_logprobs(self, name: str, count: int | None) -> None:
        most = min(self._tokenizer.num_tokens, self._tokenizer.vocab_size)
        if count is not None and count > most:
            raise RowError("bad_parameter", f"{name} asks for {count} tokens: the vocabulary has {most}")

    def _stopping(self, params: SamplingParams) -> StopCondition:
        # A special token has no text to be found in, so its text stands for its id.
        special = {self._tokenizer.special_token_id(stop): stop for stop in params.stop}
        include = params.include_stop_str_in_output
        return StopCondition(
            eos_token_ids=frozenset() if params.ignore_eos and not is_structured(params) else self.eos_token_ids,
            strings=StopStrings(params.stop, self._tokenizer.decode, include=include) if params.stop else None,
            stop_tokens={
                **{token_id: token_id for token_id in params.stop_token_ids},
                **{token_id: text for token_id, text in special.items() if token_id is not None},
            },
            include=include,
            min_tokens=params.min_tokens,
        )


def _history(prompt: Prompt) -> TokenHistory | None:
    params = prompt.sampling
    repeats = params.repetition_penalty != 1
    if not (repeats or params.presence_penalty or params.frequency_penalty):
        return None
    return TokenHistory(prompt.token_ids, counts_prompt=repeats)


def _record(params: SamplingParams, sample: int) -> LogprobRecord | None:
    of_prompt = params.prompt_logprobs if sample == 0 else None  # the same for all
    if params.logprobs is None and of_prompt is None:
        return None
    return LogprobRecord(params.logprobs, of_prompt)
