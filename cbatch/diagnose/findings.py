"""What a diagnosis comes to. Made by the rules, shown by the command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal[
    "paging",
    "continuous batching",
    "chunked prefill",
    "memory",
    "token budget",
    "request limit",
    "prefix sharing",
    "speculation",
    "input",
    "output",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that holds a run back."""

    cause: Cause
    evidence: str
    advice: str  # what to set
    gain: float | None = None  # share of the time that it would save, by simulation; None where that is not known
    itl_factor: float | None = None  # by which the P99 time between tokens would shrink
    assumption: str = ""  # on which the gain rests

    @property
    def weight(self) -> tuple[bool, float, float]:
        """What findings are sorted by, the largest first: time, then latency; unknown gains come last."""
        return self.gain is not None, self.gain or 0.0, self.itl_factor or 0.0


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that exclude one another."""

    settings: str
    problem: str
    advice: str
    versions: str = ""  # of the engine in which it holds
    source: str = ""  # where that is documented


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found."""

    subject: str  # what was looked at, and on what the predictions rest
    findings: tuple[Finding, ...]  # the weightiest first
    conflicts: tuple[Conflict, ...] = ()
    notes: tuple[str, ...] = ()
    unseen: str = ""  # what was not seen, so that having found nothing there says nothing

    @property
    def verdict(self) -> str:
        """What there is to say where nothing was found."""
        if self.unseen:
            return f"nothing was found in what was seen; it was not seen {self.unseen}"
        return "nothing holds it back that a setting would help"
