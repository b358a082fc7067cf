"""One finished row as an entry of the journal: our columns from the engine's output, or from what went wrong.

Called by the writer, off the engine's thread: decoding text is done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cbatch.engine.record import TokenLogprobs
from cbatch.engine.request import RequestMetrics, RequestOutput
from cbatch.errors import RowError
from cbatch.io.jsonform import format_utc
from cbatch.jobs.journal import Entry, Head
from cbatch.jobs.prompts import PROMPT_TOO_LONG
from cbatch.jobs.reader import JobRow

SAMPLES = "samples"  # in the journal only: each of n > 1 by itself


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int]) -> str:
        """Decode without special tokens."""

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a text."""


@dataclass(frozen=True, slots=True)
class Session:
    """What all entries of one process have in common."""

    number: int
    fit: str  # how prompts are made to fit the context
    return_token_ids: bool
    retry_errors: bool

    def wants_again(self, head: Head) -> bool:
        """Whether a row that the journal has must be run again all the same."""
        if not head.ok and self.retry_errors:
            return True
        if head.fit is not None and head.fit != self.fit:  # its answer depended on it
            return True
        return head.ok and self.return_token_ids and not head.has_token_ids


def finished_entry(
    row: JobRow, output: RequestOutput, decoder: Decoder, session: Session, *, num_dropped: int, generate_s: float
) -> Entry:
    """Build the entry of a row that the engine finished, or gave up."""
    failed = output.error is not None
    result = _result(row) | _latency(output.metrics)
    result |= {
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.num_prompt_tokens,
        "cached_tokens": output.metrics.cached_tokens,
        "recomputed_tokens": output.metrics.recomputed_tokens,
        "preemptions": output.metrics.preemptions,
    }
    if output.error is not None:
        result["error"] = RowError(output.error.code, f"{row.row.location}: {output.error.message}").as_dict()
    else:
        samples = output.samples or (output,)
        texts = [sample.text(decoder.decode) for sample in samples]
        result |= _sample(output, texts[0], decoder)
        result["stop_reason"] = output.stop_reason
        result["completion_tokens"] = sum(len(sample.token_ids) for sample in samples)
        if session.return_token_ids:
            result["completion_token_ids"] = output.token_ids
        if output.samples:
            result["completions"] = texts
            result[SAMPLES] = [_sample(*pair, decoder) for pair in zip(samples, texts, strict=True)]
        result |= _logprobs("prompt_", output.prompt_logprobs, decoder)
    head = Head(
        row.claim.key,
        row.source,
        ok=not failed,
        attempt=row.claim.num_attempts + 1,
        session=session.number,
        generate_s=generate_s,
        computed_tokens=output.metrics.computed_tokens,
        num_dropped=num_dropped,
        has_token_ids=session.return_token_ids and not failed,
        fit=session.fit if num_dropped else None,
    )
    return Entry(head, row.row.columns, result)


def failed_entry(row: JobRow, error: RowError, session: Session) -> Entry:
    """Build the entry of a row that never reached the engine."""
    head = Head(
        row.claim.key,
        row.source,
        ok=False,
        attempt=row.claim.num_attempts + 1,
        session=session.number,
        fit=session.fit if error.code == PROMPT_TOO_LONG else None,
    )
    return Entry(head, row.row.columns, _result(row) | {"finish_reason": "error", "error": error.as_dict()})


def _result(row: JobRow) -> dict[str, Any]:
    return {"row": row.index, "completion": None, "attempt": row.claim.num_attempts + 1}


def _sample(output: RequestOutput, text: str, decoder: Decoder) -> dict[str, Any]:
    """What is known of one sample."""
    result: dict[str, Any] = {"completion": text, "finish_reason": output.finish_reason}
    if output.logprobs is not None:
        result["tokens"] = [decoder.token_text(token_id) for token_id in output.token_ids]
    return result | _logprobs("", output.logprobs, decoder)


def _logprobs(prefix: str, scores: TokenLogprobs | None, decoder: Decoder) -> dict[str, Any]:
    if scores is None:
        return {}
    columns: dict[str, Any] = {f"{prefix}token_logprobs": scores.tokens}
    if scores.top is not None:
        columns[f"{prefix}top_logprobs"] = [
            None if top is None else [_scored(decoder, *entry) for entry in top] for top in scores.top
        ]
    return columns


def _scored(decoder: Decoder, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": decoder.token_text(token_id), "token_id": token_id, "logprob": logprob}


def _latency(metrics: RequestMetrics) -> dict[str, Any]:
    started = metrics.queue_s is not None and metrics.prefill_s is not None
    return {
        "scheduled_at": None if metrics.scheduled_at is None else format_utc(metrics.scheduled_at),
        "queue_s": metrics.queue_s,
        "prefill_s": metrics.prefill_s,
        "ttft_s": (metrics.queue_s or 0.0) + (metrics.prefill_s or 0.0) if started else None,
        "itl_mean_s": metrics.itl_mean_s,
        "itl_p99_s": metrics.itl_p99_s,
        "e2e_s": metrics.e2e_s,
    }
