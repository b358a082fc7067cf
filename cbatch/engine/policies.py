"""The scheduling policies that a user can choose by name (`scheduler_type`): what differs over the common mechanism.

Looked up by the plan and the engine. Leaves out the modes that are there for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterable

from cbatch.engine.offline import OfflineScheduler
from cbatch.engine.request import Request
from cbatch.engine.scheduler import Scheduler


class FifoScheduler(Scheduler):
    """Active decodes, then active prefills, then waiting requests in arrival order."""

    default_safety_margin = 0.15


class PrefillFirstScheduler(Scheduler):
    """Prompts that were split are completed before decoding resumes; then waiting requests in arrival order."""

    default_safety_margin = 0.0

    def order_active(self) -> Iterable[Request]:
        decodes, prefills = self._split_active()
        return [*prefills, *decodes]


SCHEDULERS: dict[str, type[Scheduler]] = {
    "fifo": FifoScheduler,
    "prefill_first": PrefillFirstScheduler,
    "offline": OfflineScheduler,
}
