"""Turns a request that left the engine into the frozen result that its caller gets."""

from __future__ import annotations

import time

import numpy as np

from cbatch.engine.request import Prompt, Request, RequestMetrics, RequestOutput
from cbatch.engine.step import FinishedRequest
from cbatch.errors import RowError


def failed_output(prompt: Prompt, error: RowError) -> RequestOutput:
    """Give the result of a prompt that was refused before it ran."""
    return RequestOutput(
        request_id=prompt.request_id,
        num_prompt_tokens=len(prompt.token_ids),
        token_ids=[],
        finish_reason="error",
        error=error,
    )


def empty_output(request: Request) -> RequestOutput:
    """Give the result of a request that there is nothing to compute for."""
    record = request.logprobs
    return RequestOutput(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        token_ids=[],
        finish_reason="length",
        logprobs=None if record is None else record.generated(0),
        prompt_logprobs=None if record is None else record.prompt(),
    )


def finished_output(finished: FinishedRequest, now: float) -> RequestOutput:
    """Give the result of a request that ended at `now` (monotonic seconds)."""
    request, outcome, record = finished.request, finished.outcome, finished.request.logprobs
    generated = request.token_ids[request.num_prompt_tokens :]
    # The last token is what ends a request, unless it fails in place of one or wants none.
    has_token = request.token_times and not isinstance(outcome, RowError)
    metrics = _metrics(request, now, finished_at=request.token_times[-1] if has_token else now)
    if isinstance(outcome, RowError):
        return RequestOutput(
            request.request_id, request.num_prompt_tokens, generated, "error", error=outcome, metrics=metrics
        )
    return RequestOutput(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        token_ids=generated,
        finish_reason=outcome.finish_reason,
        stop_reason=outcome.stop_reason,
        text_length=outcome.text_length,
        num_text_tokens=outcome.num_text_tokens,
        text_suffix=outcome.text_suffix,
        logprobs=None if record is None else record.generated(len(generated)),
        prompt_logprobs=None if record is None else record.prompt(),
        metrics=metrics,
    )


def _metrics(request: Request, now: float, finished_at: float) -> RequestMetrics:
    scheduled_at, token_times = request.scheduled_at, request.token_times
    assert scheduled_at is not None, "only a scheduled request can finish"
    between = np.diff(np.frombuffer(token_times)) if len(token_times) > 1 else None
    return RequestMetrics(
        scheduled_at=time.time() - (now - scheduled_at),
        queue_s=scheduled_at - request.created_at,
        prefill_s=token_times[0] - scheduled_at if token_times else None,
        itl_mean_s=float(between.mean()) if between is not None else None,
        itl_p99_s=float(np.percentile(between, 99)) if between is not None else None,
        e2e_s=finished_at - request.created_at,
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        recomputed_tokens=request.recomputed_tokens,
        preemptions=request.preemptions,
        token_times=token_times,
    )
