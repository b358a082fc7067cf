"""What a step costs, as far as its duration follows from what it computes. Used by the simulator; fitted by `fit`.

    per step + per query token (beyond the hidden ones) + per KV token read + per request + per attended pair

Where weights are read from memory for every step, a device computes a number of query tokens in the time that this
takes anyway: they are hidden behind it. On a CPU there are none. Copies of requests that move to the host and back are
taken to cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds, none of them negative."""

    per_step_s: float
    per_query_token_s: float
    per_kv_token_s: float  # read by one request, averaged over layers, whole pages
    per_request_s: float
    per_pair_s: float = 0.0  # of a prefill's query token with a token that it attends to
    hidden_tokens: int = 0  # query tokens that cost nothing beside a step

    def step_s(self, num_tokens: int, kv_tokens: float, num_requests: int, num_pairs: int) -> float:
        """Return the duration of a step."""
        return (
            self.per_step_s
            + self.per_query_token_s * max(0, num_tokens - self.hidden_tokens)
            + self.per_kv_token_s * kv_tokens
            + self.per_request_s * num_requests
            + self.per_pair_s * num_pairs
        )

    def describe(self) -> str:
        """Spell the constants in one line."""
        words = [
            f"{self.per_step_s * 1e3:.4g} ms a step",
            f"{self.per_query_token_s * 1e6:.4g} µs a query token",
            f"{self.per_kv_token_s * 1e9:.4g} ns a KV token read",
            f"{self.per_request_s * 1e6:.4g} µs a request",
        ]
        words += [f"{self.per_pair_s * 1e9:.4g} ns a pair attended to"] if self.per_pair_s else []
        words += [f"{self.hidden_tokens} query tokens hidden"] if self.hidden_tokens else []
        return ", ".join(words)
