"""Plans a job over several GPUs: every shard simulated by itself. Called by `simulate --gpus`.

A shard has the rows that `run --shard i/n` would give it, contiguous ones. Shards are jobs of their own (processes on
a node, tasks of an array), so they neither wait for nor share with one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbatch.jobs.shards import Shard
from cbatch.simulate.cost import CostModel
from cbatch.simulate.figures import Figures
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.simulator import Simulator
from cbatch.simulate.workload import GivenWorkload, Workload

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """A job over several GPUs."""

    shards: Sequence[Figures]
    load_s: float | None  # of the model, in every shard; None: not known, and left out

    @property
    def duration_s(self) -> float:
        """Until the slowest shard is done, loading included where it is known."""
        return (self.load_s or 0.0) + max(shard.duration_s for shard in self.shards)

    @property
    def gpu_hours(self) -> float:
        """What all shards take together, each giving its GPU back when it is done."""
        return sum((self.load_s or 0.0) + shard.duration_s for shard in self.shards) / HOUR_S

    @property
    def output_tokens_per_s(self) -> float:
        """Of the whole job, over `duration_s`."""
        return sum(shard.output_tokens for shard in self.shards) / self.duration_s if self.duration_s else 0.0


def plan_shards(
    engine: SimulatedEngine, cost: CostModel, workload: Workload, num_gpus: int, load_s: float | None
) -> ShardedPlan:
    """Simulate every shard of a job on as many GPUs; those that get no row are left out."""
    works = list(workload)
    parts = (Shard(index, num_gpus, "").rows(len(works)) for index in range(num_gpus))
    shards = [Simulator(engine, cost).run(GivenWorkload(works[rows.start : rows.stop])) for rows in parts if len(rows)]
    return ShardedPlan(shards, load_s)
