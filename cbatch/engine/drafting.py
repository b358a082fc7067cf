"""Fills what a step leaves of its budget with drafts of those requests that generate. Called by the scheduler.

A step takes drafts last of all, and none while anything starves: they cost nobody a place, nor the next block. What
they may cost is time, so the limits say up to how many query tokens a step is filled with them.
"""

from __future__ import annotations

from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.request import Request, RequestStatus
from cbatch.engine.speculation import PromptLookup
from cbatch.engine.step import ScheduledRequest, StepLimits, StepPlan
from cbatch.units import ceil_div


def add_drafts(plan: StepPlan, limits: StepLimits, cache: CacheManager, num_active: int) -> None:
    """Give each request of `plan` that generates an equal share of the room, in place."""
    room = min(limits.max_tokens_with_drafts, limits.max_batch_tokens) - plan.num_tokens
    room = min(room, limits.max_requests_per_batch - plan.num_logits)
    generating = [i for i, item in enumerate(plan.items) if item.request.status is RequestStatus.DECODING]
    for num_before, i in enumerate(generating):
        item = plan.items[i]
        drafts = _propose(item, ceil_div(room, len(generating) - num_before))
        if not drafts or not _has_blocks(item, len(drafts), cache, num_active):
            continue
        num_tokens = item.num_tokens + len(drafts)
        num_pages = cache.num_pages_read(item.request, item.num_computed_before + num_tokens)
        num_more_pages = num_pages - item.num_pages_read
        if plan.num_pages_read + num_more_pages > limits.max_pages_read:
            continue
        cache.extend(item.request, item.num_computed_before + num_tokens)
        plan.items[i] = item._replace(
            num_tokens=num_tokens, num_pages_read=num_pages, num_results=1 + len(drafts), drafts=drafts
        )
        plan.num_tokens += len(drafts)
        plan.num_decode_tokens += len(drafts)
        plan.num_logits += len(drafts)
        plan.num_pages_read += num_more_pages
        room -= len(drafts)


def _propose(item: ScheduledRequest, most: int) -> tuple[int, ...]:
    """Guess up to `most` tokens that a request says next, and none behind its last one."""
    request = item.request
    most = min(most, request.max_tokens - request.num_generated - 1)
    if most <= 0 or not item.num_results:
        return ()
    request.lookup = request.lookup or PromptLookup()
    return _until_end(request, request.lookup.propose(request.token_ids, most))


def _until_end(request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Cut drafts where the request would end: there is no token behind that one."""
    ending = request.stopping.ending_token_ids
    return next((drafts[:i] for i, token_id in enumerate(drafts) if token_id in ending), drafts)


def _has_blocks(item: ScheduledRequest, num_drafts: int, cache: CacheManager, num_active: int) -> bool:
    """Tell whether drafts have room, and leave every active request its next block."""
    end = item.num_computed_before + item.num_tokens + num_drafts
    if end <= item.request.num_slots:
        return True
    return cache.has_room([missing + num_active for missing in cache.num_missing_blocks(item.request, end)])
