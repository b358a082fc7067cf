"""What a step is: its limits, its plan, its results, and what it ends. Written by the scheduler and by who runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cbatch.engine.offload import Moves
from cbatch.engine.request import Request
from cbatch.engine.speculation import Results
from cbatch.engine.stopping import Stop
from cbatch.errors import RowError


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one forward pass may hold."""

    max_batch_tokens: int  # query tokens
    max_requests_per_batch: int
    max_pages_read: int  # KV pages over all requests and layers, those of shared blocks once for each reader
    max_tokens_with_drafts: int = 0  # query tokens up to which a step is filled with drafts


class ScheduledRequest(NamedTuple):  # made for every request of every step, which dataclasses are slow at
    """A request's share of a step: its next `num_tokens` query tokens, uncomputed ones and then drafts."""

    request: Request
    num_tokens: int
    num_computed_before: int
    num_pages_read: int = 0
    # Rows of logits that tell a token: none until the request's last token is computed. That one's logits give the
    # next token, and a draft's the token behind it.
    num_results: int = 0
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One forward pass: written by `schedule`, read by the batch builder and by `update`."""

    items: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    num_decode_tokens: int = 0  # of these, the ones of requests that generate
    num_logits: int = 0  # rows of logits; one for each request, sampling or not, but for prompts that are scored
    num_pages_read: int = 0
    moves: Moves = field(default_factory=Moves)  # carried out before the forward pass

    @property
    def num_pairs(self) -> int:
        """Count the pairs of a prompt's query token and a token that it attends to."""
        shares = ((i.num_tokens, i.num_computed_before) for i in self.items if i.num_tokens > 1 and not i.drafts)
        return sum(count * before + count * (count + 1) // 2 for count, before in shares)


class RunningStep(Protocol):
    """A step that was launched."""

    def collect(self) -> list[Results]:
        """Wait for it; give tokens or a failure for each request that samples, in plan order. Called once."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose results were there as soon as it was launched."""

    results: list[Results]

    def collect(self) -> list[Results]:
        """Give them."""
        return self.results


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that left in `update`, and why."""

    request: Request
    outcome: Stop | RowError
