"""What vLLM's documentation says excludes what, as far as its command line shows it, with versions where it gives any.

`PAGES` are the pages as they were in vLLM's repository when this was written; where a page gives no version, the entry
holds for the versions that page is of, and the diagnosis says which page it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SPECULATION_PAGE = "docs/features/speculative_decoding/README.md, Known Feature Incompatibility"
MATRIX_PAGE = "docs/features/README.md, Compatibility Matrix"
SCHEDULER_PAGE = "vllm/config/scheduler.py, checks of SchedulerConfig"
ASYNC_PAGE = "docs: engine arguments, --async-scheduling, v0.10 to v0.13"

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFeatures:
    """What a command line turns on, as far as the table asks."""

    speculation: bool = False
    draft_model: bool = False  # speculation by a second model of the ordinary kind
    pipeline_parallel: bool = False
    lora: bool = False
    pooling: bool = False
    chunked_prefill: bool | None = None  # None: vLLM's default, on
    prompt_embeds: bool = False
    multi_step: bool = False
    async_scheduling: bool = False
    cpu: bool = False
    max_batch_tokens: int | None = None
    max_requests: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmExclusion:
    """Two features that vLLM documents as excluding one another."""

    settings: str
    excludes: Callable[[VllmFeatures], bool]
    advice: str
    page: str
    until: Version | None = None  # the last version of which it is said; None: no version is given

    @property
    def versions(self) -> str:
        """Spell the versions of which it is said."""
        return f"up to {'.'.join(map(str, self.until))}" if self.until else ""

    def holds_in(self, version: Version | None) -> bool:
        """Whether it is said of a version; of one that is not known everything is."""
        return version is None or self.until is None or version <= self.until


VLLM_EXCLUSIONS = (
    VllmExclusion(
        settings="--speculative-config with --pipeline-parallel-size",
        excludes=lambda f: f.speculation and f.pipeline_parallel,
        advice="use --tensor-parallel-size instead, leave speculation out, or take a newer version",
        page=SPECULATION_PAGE,
        until=(0, 15, 0),
    ),
    VllmExclusion(
        settings="--speculative-config with a draft model",
        excludes=lambda f: f.draft_model,
        advice="take method ngram or eagle, or a newer version",
        page=SPECULATION_PAGE,
        until=(0, 10, 0),
    ),
    VllmExclusion(
        settings="--speculative-config with --enable-lora",
        excludes=lambda f: f.speculation and f.lora,
        advice="leave one of the two out",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--speculative-config with a pooling model",
        excludes=lambda f: f.speculation and f.pooling,
        advice="leave speculation out: there is nothing to speculate on",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--speculative-config with --enable-prompt-embeds",
        excludes=lambda f: f.speculation and f.prompt_embeds,
        advice="leave one of the two out",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--speculative-config on a CPU",
        excludes=lambda f: f.speculation and f.cpu,
        advice="leave speculation out",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--num-scheduler-steps with chunked prefill",
        excludes=lambda f: f.multi_step and f.chunked_prefill is True,
        advice="leave --num-scheduler-steps out; it is gone in newer versions",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--num-scheduler-steps with --enable-lora",
        excludes=lambda f: f.multi_step and f.lora,
        advice="leave --num-scheduler-steps out; it is gone in newer versions",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--num-scheduler-steps with --speculative-config",
        excludes=lambda f: f.multi_step and f.speculation,
        advice="leave --num-scheduler-steps out; it is gone in newer versions",
        page=MATRIX_PAGE,
    ),
    VllmExclusion(
        settings="--async-scheduling with --pipeline-parallel-size",
        excludes=lambda f: f.async_scheduling and f.pipeline_parallel,
        advice="leave --async-scheduling out",
        page=ASYNC_PAGE,
        until=(0, 14, 0),
    ),
    VllmExclusion(
        settings="--async-scheduling with --speculative-config",
        excludes=lambda f: f.async_scheduling and f.speculation,
        advice="leave --async-scheduling out, or take 0.14.0 or newer",
        page=ASYNC_PAGE,
        until=(0, 13, 0),
    ),
    VllmExclusion(
        settings="--no-enable-chunked-prefill with --max-num-batched-tokens below --max-model-len",
        excludes=lambda f: (
            f.chunked_prefill is False
            and f.max_batch_tokens is not None
            and f.max_model_len is not None
            and f.max_batch_tokens < f.max_model_len
        ),
        advice="leave --no-enable-chunked-prefill out, or raise --max-num-batched-tokens to --max-model-len",
        page=SCHEDULER_PAGE,
    ),
    VllmExclusion(
        settings="--max-num-batched-tokens below --max-num-seqs",
        excludes=lambda f: (
            f.max_batch_tokens is not None and f.max_requests is not None and f.max_batch_tokens < f.max_requests
        ),
        advice="every request has a token a step: raise --max-num-batched-tokens to --max-num-seqs at least",
        page=SCHEDULER_PAGE,
    ),
)
