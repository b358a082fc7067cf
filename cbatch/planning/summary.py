"""A job's plan as plain values, for JSON and for the tables. Called by the command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cbatch.engine.sizing import block_bytes
from cbatch.planning.job_plan import JobPlan
from cbatch.planning.lengths import contiguous_waste, distribution, paged_waste


def summarize(plan: JobPlan) -> dict[str, Any]:
    """Spell a plan."""
    return {
        "kind": "plan",
        "model": plan.config.model,
        "rows": _rows(plan),
        "tokens": _tokens(plan),
        "prefix": _prefix(plan),
        "memory": _memory(plan),
        "dry_run": _dry_run(plan),
        "settings": plan.plan.settings() if plan.plan is not None else None,
        "estimate": plan.estimate.as_dict() if plan.estimate is not None else None,
        "advice": plan.advice.as_dict() if plan.advice is not None else None,
    }


def _rows(plan: JobPlan) -> dict[str, Any]:
    rows = plan.rows
    return {
        "rows": rows.num_rows,
        "rows_ok": rows.num_ok,
        "rows_error": rows.num_errors,
        "rows_truncated": rows.num_truncated,
        "errors": dict(rows.errors.most_common()),
        "first_errors": [asdict(error) for error in rows.shown],
    }


def _tokens(plan: JobPlan) -> dict[str, Any]:
    lengths = plan.rows.lengths
    found = {"prompt": distribution(lengths.prompts), "output_at_most": distribution(lengths.outputs)}
    return {name: None if values is None else values.as_dict() for name, values in found.items()}


def _prefix(plan: JobPlan) -> dict[str, Any]:
    """The most that could be shared, and what the cache gets of it, in the order in which rows run."""
    dry, rows = plan.dry, plan.rows
    return {
        "shareable_tokens": rows.shareable_tokens,
        "rows_compared_with": plan.tree.num_remembered,
        "cached_tokens": dry.stats.cached_tokens if dry is not None else None,
        "of_rows": dry.num_rows if dry is not None else None,
        "of_prompt_tokens": dry.stats.prompt_tokens if dry is not None else None,
    }


def _memory(plan: JobPlan) -> dict[str, Any]:
    shape, dtype, decided = plan.outline.shape, plan.outline.dtype, plan.plan
    token_bytes = block_bytes(shape, dtype, page_size=1)
    requests = plan.rows.lengths.requests
    found: dict[str, Any] = {
        "free_bytes": plan.memory.num_bytes,
        "free_source": plan.memory.source,
        "weight_bytes": plan.weights,
        "kv_bytes_per_token": token_bytes,
        "kv_bytes_of_longest_context": token_bytes * plan.max_model_len,
        "max_model_len": plan.max_model_len,
        "fits": plan.misfit is None,
        "misfit": None if plan.misfit is None else str(plan.misfit),
    }
    if requests:
        found["contiguous_waste"] = contiguous_waste(requests, plan.max_model_len)
    if decided is not None:
        cache_tokens = decided.num_blocks * decided.page_size
        found |= {
            "cache_bytes": decided.num_blocks * block_bytes(shape, dtype, decided.page_size),
            "cache_tokens": cache_tokens,
            "page_size": decided.page_size,
            "contexts_at_once_contiguous": cache_tokens // plan.max_model_len,
        }
        if requests:
            found["paged_waste"] = paged_waste(requests, decided.page_size)
            found["contexts_at_once_paged"] = int(cache_tokens / (sum(requests) / len(requests)))
    return found


def _dry_run(plan: JobPlan) -> dict[str, Any] | None:
    if plan.dry is None:
        return None
    stats = plan.dry.stats
    return {
        "rows": plan.dry.num_rows,
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "computed_tokens": stats.computed_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "output_tokens": stats.output_tokens,
        "preemptions": stats.preemptions,
        "offloads": stats.offloads,
        "soft_resets": stats.soft_resets,
        "kv_waste_fraction": stats.kv_waste_fraction,
        "max_cache_usage": stats.max_cache_usage,
    }
