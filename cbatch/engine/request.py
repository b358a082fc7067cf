"""A request, from what the caller hands in (`Prompt`) over its live state (`Request`) to its result (`RequestOutput`).

`Request` is written by the scheduler only. Progress is one number, `num_computed_tokens`: everything else
(prefilling or decoding, what is left to compute) follows from it and the token list.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from cbatch.config import SamplingParams
from cbatch.engine.grammar import Constraint
from cbatch.engine.history import TokenHistory
from cbatch.engine.record import LogprobRecord, TokenLogprobs
from cbatch.engine.speculation import PromptLookup
from cbatch.engine.stopping import StopCondition
from cbatch.errors import RowError

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One generation asked of the engine; `request_id` is the caller's, unique among unfinished ones."""

    request_id: int
    token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds and counts of one finished request.

    `scheduled_at` is UTC seconds since the epoch; None where the request never ran.
    """

    scheduled_at: float | None = None
    queue_s: float | None = None  # handed in → first scheduled
    prefill_s: float | None = None  # first scheduled → first token
    itl_mean_s: float | None = None  # between tokens; None with fewer than two
    itl_p99_s: float | None = None
    e2e_s: float | None = None  # handed in → finished
    cached_tokens: int = 0  # prompt tokens reused, not computed
    computed_tokens: int = 0  # tokens whose KV was computed, recomputed ones left out
    recomputed_tokens: int = 0  # computed again after a soft reset
    preemptions: int = 0
    token_times: array[float] | None = None  # monotonic seconds at which each token came; None for joined samples


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one `Prompt`. `token_ids` counts every generated token, an ending EOS included."""

    request_id: int
    num_prompt_tokens: int
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or token; None for EOS and length
    text_length: int | None = None  # characters of the decoded text that count; None: all
    num_text_tokens: int | None = None  # tokens that make the text, an ending one left out; None: all
    text_suffix: str = ""  # a special token that ended it, where it was to be included
    logprobs: TokenLogprobs | None = None  # of `token_ids`, where asked for
    prompt_logprobs: TokenLogprobs | None = None
    samples: tuple[RequestOutput, ...] = ()  # all of them, where more than one was asked for; the rest is the first's
    error: RowError | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """Decode the completion's text, with the tokenizer's `decode`."""
        return decode(self.token_ids[: self.num_text_tokens])[: self.text_length] + self.text_suffix


class RequestStatus(Enum):
    PENDING = "pending"  # queued, owns no blocks
    PREFILLING = "prefilling"  # tokens beyond the last sampled one still lack KV
    DECODING = "decoding"  # one token a step
    FINISHED = "finished"


# What every step asks of every request: until Python 3.12 a member looked up in its class costs more than a call.
PENDING, PREFILLING, DECODING, FINISHED = RequestStatus


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the engine. Written by the scheduler; its tables by the cache manager."""

    prompt: Prompt
    max_tokens: int
    created_at: float  # monotonic seconds, like all times here
    stopping: StopCondition
    token_ids: list[int]  # prompt and generated
    tables: list[array[int]]  # one block table per allocator
    sample: int = 0  # which of its prompt's samples it is
    history: TokenHistory | None = None  # where penalties need it; written by the sampler
    logprobs: LogprobRecord | None = None  # where they are asked for; written by the model runner
    constraint: Constraint | None = None  # where the output is structured; written by the sampler
    lookup: PromptLookup | None = None  # where its drafts come from, once there were any
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, as far as needed
    host_pages: list[int] = field(default_factory=list)  # where its KV lies while it is moved out
    num_slots: int = 0  # tokens that its tables have room for
    num_computed_tokens: int = 0  # tokens whose KV is in the cache, or on the host, or will be by the steps in flight
    num_in_flight: int = 0  # steps that it is in and whose results are not there yet
    num_pending: int = 0  # tokens behind `token_ids` that those choose
    num_ever_computed: int = 0  # the most that it was, before a soft reset took it back
    status: RequestStatus = RequestStatus.PENDING
    scheduled_at: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0

    @property
    def request_id(self) -> int:
        return self.prompt.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, those included that are not known yet."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.prompt.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt still lack the log-probabilities that were asked for."""
        record = self.logprobs
        wanted = record is not None and record.num_prompt_top is not None
        return wanted and record is not None and record.num_scored < self.num_prompt_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def awaits_results(self) -> bool:
        """Whether its next step needs what the steps in flight have not told yet, or there will be none."""
        if not self.num_in_flight:
            return False
        if self.num_pending and (self.history is not None or self.constraint is not None):
            return True
        # How far a prompt is scored is known when the scores are there.
        return self.is_ending or self.scores_prompt

    @property
    def is_ending(self) -> bool:
        """Whether the results of the steps in flight end it, whatever they are."""
        return self.num_pending > 0 and self.num_generated + self.num_pending >= self.max_tokens


class NextToken(NamedTuple):
    """A token that a step is to choose: the one behind a request's tokens and the `drafts` that are put behind those.

    Whether it counts depends on whether the drafts are what is chosen in their places.
    """

    request: Request
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Where in prompt and completion it goes."""
        return self.request.num_tokens + len(self.drafts)

    @property
    def must_go_on(self) -> bool:
        """Whether it may not be one that ends the completion."""
        request = self.request
        return self.position - request.num_prompt_tokens < request.prompt.sampling.min_tokens
