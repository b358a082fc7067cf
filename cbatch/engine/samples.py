"""Several samples of one prompt: each is a request of its own, and together they are one result.

The prompt is computed once where blocks can be shared: the first sample's full blocks serve the others, which wait for
them and compute only what the last, partly filled block holds. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from cbatch.engine.request import Request, RequestMetrics, RequestOutput


def sample_seed(seed: int, sample: int) -> int:
    """Give the seed of a prompt's n-th sample, from 0: a request with that seed draws the same tokens."""
    if sample == 0:
        return seed
    digest = blake2b(f"sample {sample} of {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SampleGroups:
    """Keeps finished samples until all of their prompt's are there."""

    def __init__(self) -> None:
        self._finished: dict[int, dict[int, RequestOutput]] = {}  # by request id, by sample

    def collect(self, request: Request, output: RequestOutput) -> RequestOutput | None:
        """Take a finished sample; give its prompt's result once that is whole."""
        count = request.prompt.sampling.n
        if count == 1:
            return output
        group = self._finished.setdefault(request.request_id, {})
        group[request.sample] = output
        if len(group) < count:
            return None
        del self._finished[request.request_id]
        return join_samples([group[sample] for sample in range(count)])

    def clear(self) -> None:
        """Forget the samples whose prompts are given up."""
        self._finished.clear()


def join_samples(samples: Sequence[RequestOutput]) -> RequestOutput:
    """Make one result of all samples of a prompt: the first one's, and what holds of all of them."""
    first = samples[0]
    failed = next((sample for sample in samples if sample.error is not None), None)
    cut = any(sample.finish_reason == "length" for sample in samples)
    return replace(
        first,
        finish_reason="error" if failed else "length" if cut else "stop",
        stop_reason=None if failed or cut else first.stop_reason,
        error=failed.error if failed else None,
        metrics=_join_metrics(samples),
        samples=tuple(samples),
    )


def _join_metrics(samples: Sequence[RequestOutput]) -> RequestMetrics:
    """From the first sample's start to the last one's end; the prompt's tokens count once."""
    all_metrics = [sample.metrics for sample in samples]
    first = all_metrics[0]
    ran = [m for m in all_metrics if m.queue_s is not None and m.prefill_s is not None]
    queue_s = min((m.queue_s for m in ran if m.queue_s is not None), default=first.queue_s)
    first_token_s = min(((m.queue_s or 0.0) + (m.prefill_s or 0.0) for m in ran), default=None)
    gaps = [(len(s.token_ids) - 1, s.metrics.itl_mean_s) for s in samples]
    known = [(count, mean) for count, mean in gaps if mean is not None]
    return RequestMetrics(
        scheduled_at=min((m.scheduled_at for m in all_metrics if m.scheduled_at is not None), default=None),
        queue_s=queue_s,
        prefill_s=None if first_token_s is None or queue_s is None else first_token_s - queue_s,
        itl_mean_s=sum(count * mean for count, mean in known) / sum(count for count, _ in known) if known else None,
        itl_p99_s=max((m.itl_p99_s for m in all_metrics if m.itl_p99_s is not None), default=None),
        e2e_s=max((m.e2e_s for m in all_metrics if m.e2e_s is not None), default=None),
        cached_tokens=first.cached_tokens,
        computed_tokens=sum(m.computed_tokens for m in all_metrics),
        recomputed_tokens=sum(m.recomputed_tokens for m in all_metrics),
        preemptions=sum(m.preemptions for m in all_metrics),
    )
