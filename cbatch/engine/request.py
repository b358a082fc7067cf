"""A request, from what the caller hands in (`Prompt`) over its live state (`Request`) to its result (`RequestOutput`).

`Request` is written by the scheduler only. Progress is one number, `num_computed_tokens`: everything else
(prefilling or decoding, what is left to compute) follows from it and the token list.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from cbatch.config import SamplingParams
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


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one `Prompt`. `token_ids` counts every generated token, an ending EOS included."""

    request_id: int
    num_prompt_tokens: int
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or token; None for EOS and length
    text_length: int | None = None  # characters of the decoded text before the stop string; None: all
    error: RowError | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class RequestStatus(Enum):
    PENDING = "pending"  # queued, owns no blocks
    PREFILLING = "prefilling"  # tokens beyond the last sampled one still lack KV
    DECODING = "decoding"  # one token a step
    FINISHED = "finished"
