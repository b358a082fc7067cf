"""The log-probabilities that a request asks for, as they come in. Kept on the request, written by the model runner.

A prompt is scored chunk by chunk, each position once, however often it is computed; a generated token is added when it
is chosen, so that a soft reset changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TopTokens = list[tuple[int, float]]  # the likeliest tokens with their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One entry per token, natural logarithms; None for a prompt's first token, which nothing comes before."""

    tokens: list[float | None]
    top: list[TopTokens | None] | None  # None where only the tokens' own were asked for


class LogprobRecord:
    """What one request has so far."""

    def __init__(self, num_top: int | None, num_prompt_top: int | None) -> None:
        """How many of the likeliest tokens are wanted beside each generated and each prompt token; None: no scores."""
        self.num_top = num_top
        self.num_prompt_top = num_prompt_top
        self.is_finite = True
        self._generated: list[float | None] = []
        self._generated_top: list[TopTokens | None] = []
        self._prompt: list[float | None] = [None]
        self._prompt_top: list[TopTokens | None] = [None]

    @property
    def num_scored(self) -> int:
        """Positions of the prompt whose logits have scored the token after them."""
        return len(self._prompt) - 1

    def add_generated(self, logprob: float, top: TopTokens) -> None:
        """Add the token that was just chosen."""
        self._generated.append(logprob)
        self._generated_top.append(top[: self.num_top])

    def add_prompt(self, logprob: float, top: TopTokens) -> None:
        """Add the prompt's next token."""
        self.is_finite &= math.isfinite(logprob)
        self._prompt.append(logprob)
        self._prompt_top.append(top[: self.num_prompt_top])

    def generated(self, num_tokens: int) -> TokenLogprobs | None:
        """Give the scores of the `num_tokens` that were generated, None where they were not asked for.

        More may have been chosen in the last step: those behind the one that ended the request.
        """
        if self.num_top is None:
            return None
        top = self._generated_top[:num_tokens] if self.num_top else None
        return TokenLogprobs(self._generated[:num_tokens], top)

    def prompt(self) -> TokenLogprobs | None:
        """Give the prompt's scores, None where they were not asked for."""
        wanted = self.num_prompt_top
        return None if wanted is None else TokenLogprobs(self._prompt, self._prompt_top if wanted else None)
