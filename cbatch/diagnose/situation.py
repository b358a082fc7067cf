"""What the rules look at: an engine, its workload, what was observed of it, and a simulation to ask what would be.

Made from a finished run or from a configuration (`subjects`); read by the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.diagnose.observed import Observed, Steps, from_sessions, observe
from cbatch.engine.modes import CHUNKED
from cbatch.engine.observer import StepRecord
from cbatch.jobs.trace import step_as_dict
from cbatch.simulate.cost import CostModel
from cbatch.simulate.figures import Figures
from cbatch.simulate.settings import SimulatedEngine
from cbatch.simulate.simulator import Simulator
from cbatch.simulate.tracefile import TracedSession
from cbatch.simulate.workload import GivenWorkload, Work, Workload

MAX_TOKENS = 100_000  # generated in one simulation: enough for rates, few enough for an answer at once
NO_TRACE = "how much it would gain can be said of a run with --trace"
LEAST_BATCHES, LEAST_REQUESTS = 2, 256  # the smaller of both, however many tokens that is


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a finished run's report says beside its steps. All zero where there was no run.

    Of a resumed job all are those of its last session, as the job's are not known, but for `recomputed_share`.
    """

    generate_s: float = 0.0
    idle_s: float = 0.0  # waited for prompts
    starved_share: float = 0.0  # of steps, in which there was room and no prompt was ready
    output_wait_s: float = 0.0
    preemptions: int = 0
    recomputed_share: float = 0.0  # of the tokens that were computed, over the whole job
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Situation:
    """A run, or a configuration that would be one."""

    engine: SimulatedEngine
    facts: Facts = Facts()
    observed: Observed | None = None
    steps: Steps | None = None  # that were observed
    cost: CostModel | None = None  # without one nothing can be predicted
    workload: Workload | None = None
    mode: str = CHUNKED
    shared_share: float = 0.0  # of the prompts' tokens, that are at the start of an earlier prompt too
    speculation: int | None = None  # query tokens up to which steps are filled with drafts; None: not known
    options: dict[str, str] = field(default_factory=dict)  # how a setting is spelled, where not as ours
    has_given_blocks: bool = False  # whether num_blocks was asked for, so that it stays when pages change
    measured_s: float | None = None  # that all of the workload took, and nothing else
    unpredictable: str = NO_TRACE  # why nothing can be predicted, where that is so
    unseen: str = ""  # what of the run was not seen, so that nobody can say what holds it back
    notes: list[str] = field(default_factory=list)  # on what it all rests
    _known: dict[Any, Figures] = field(default_factory=dict)
    _sample: GivenWorkload | None = None

    @property
    def can_predict(self) -> bool:
        return self.cost is not None and self.workload is not None

    @property
    def sample(self) -> GivenWorkload:
        """The first requests of the workload, as many as are simulated."""
        assert self.workload is not None
        if self._sample is None:
            works: list[Work] = []
            num_tokens, least = 0, min(LEAST_BATCHES * self.engine.max_requests_per_batch, LEAST_REQUESTS)
            for work in self.workload:
                if num_tokens > MAX_TOKENS and len(works) >= least:
                    break
                works.append(work)
                num_tokens += work.output_tokens
            self._sample = GivenWorkload(works)
        return self._sample

    def predict(self, *, mode: str | None = None, shared_share: float | None = None, **changes: Any) -> Figures:
        """Simulate the run with other settings."""
        assert self.cost is not None
        assert self.workload is not None
        engine = replace(self.engine, **changes)
        key = (engine, mode or self.mode, shared_share)
        if key not in self._known:
            workload = self.sample
            if shared_share is not None:
                works = [w._replace(shared_tokens=int(shared_share * w.prompt_tokens)) for w in workload]
                workload = GivenWorkload(works)
            self._known[key] = Simulator(engine, self.cost, mode=key[1]).run(workload)
        return self._known[key]

    def gain(self, figures: Figures) -> float:
        """Return the share of the time that `figures` save, both of them simulated."""
        now = self.predict().duration_s
        return 1 - figures.duration_s / now if now > 0 else 0.0

    def spell(self, name: str, value: object) -> str:
        """Spell a setting as it is given to the engine in question."""
        option = self.options.get(name, "--" + name.replace("_", "-"))
        return option if value is True else f"{option} {value}"

    def look_at(self, steps: Steps) -> None:
        """Observe the steps of a run, real or simulated."""
        self.steps, self.observed = steps, observe(steps, self.engine, self.mode)

    def watch(self) -> None:
        """Observe a simulated run where there was no real one."""
        assert self.cost is not None
        assert self.workload is not None
        session = TracedSession({}, [])
        recorder = _Recorder(session)
        Simulator(self.engine, self.cost, mode=self.mode, observer=recorder).run(self.sample)
        if session.num_steps:
            self.look_at(from_sessions([session]))


class _Recorder:
    """Keeps the steps of a simulation as a trace has them."""

    def __init__(self, session: TracedSession) -> None:
        self._session = session

    def on_step(self, record: StepRecord) -> None:
        self._session.add(step_as_dict(record, began=0.0))
