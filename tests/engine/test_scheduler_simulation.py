"""The scheduler against a plodding simulation, and what it schedules against a toy model over a KV store.

`Twin` follows the spec's words with lists alone. It keeps no counter, hash or index: whatever it needs to know it
finds by looking at everything. Both must choose the same steps; the fake runner checks every slot that is read.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from cbatch.engine.cache.allocator import make_table
from cbatch.engine.cache.build import build_cache, group_layers
from cbatch.engine.cache.manager import CacheManager
from cbatch.engine.request import Request
from cbatch.engine.step import StepLimits, StepPlan
from cbatch.errors import RowError
from tests.engine.fakes import Harness, completion, make_cache, make_request, toy_model

MAX_MODEL_LEN = 60  # the longest prompt with the most tokens is shorter
Content = tuple[int, ...]  # a block's tokens and all before it


@dataclass(eq=False)
class Block:
    content: Content | None = None  # once completed; None as well where an equal block was there before


@dataclass(eq=False)
class Job:
    job_id: int
    tokens: list[int]
    end: int  # of the tokens, at which it is done
    eos: bool
    fails_at: int | None
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    announced: list[Content] = field(default_factory=list)  # contents that it was first to say it would compute
    hosted: int = 0  # blocks in host memory


class Twin:
    """The schedulers with prefix sharing and offloading, the slow way."""

    def __init__(self, case: Case) -> None:
        self.num_blocks, self.page_size, self.sharing = case.num_blocks, case.page_size, case.sharing
        self.limits, self.policy, self.margin = case.limits, case.policy, case.safety_margin
        self.host_free = case.num_host_blocks
        self.waiting: list[Job] = []
        self.active: list[Job] = []
        self.cached: list[Block] = []  # completed, owned by nobody, oldest first

    # The cache, counted anew each time

    def owned(self) -> list[Block]:
        return list(dict.fromkeys(block for job in self.active for block in job.blocks))

    def num_free(self) -> int:
        return self.num_blocks - len(self.owned())

    def num_pages(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.page_size))

    def contents(self, tokens: list[int]) -> list[Content]:
        size = self.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)] if self.sharing else []

    def find(self, content: Content) -> Block | None:
        return next((block for block in self.owned() + self.cached if block.content == content), None)

    def grow(self, job: Job, num_tokens: int) -> bool:
        missing = self.num_pages(num_tokens) - len(job.blocks)
        if missing > self.num_free():
            return False
        for _ in range(missing):
            if len(self.owned()) + len(self.cached) == self.num_blocks:
                self.cached.pop()
            job.blocks.append(Block())
        return True

    def give_back(self, job: Job, *, failed: bool = False) -> None:
        """Called when the job is no longer active."""
        for block in job.blocks:
            if failed:
                block.content = None
            if block.content is not None and block not in self.owned():
                self.cached.append(block)
        job.blocks, job.announced = [], []

    # A step

    def schedule(self) -> tuple[list[tuple[int, int, int]], list[int], list[int]]:
        """Return (job, first token, tokens) of the step, and the jobs that it offloaded and reset."""
        items: list[tuple[Job, int]] = []
        offloaded: list[int] = []
        reset: list[int] = []
        starved = self.schedule_these(self.in_order(), items)
        if not starved:
            self.admit(items)
        while starved:
            candidates = starved if items else self.active
            newest = max(candidates, key=self.active.index)
            self.active.remove(newest)
            self.waiting.insert(0, newest)
            self.give_back(newest)
            if 0 < (used := self.num_pages(newest.computed)) <= self.host_free:
                newest.hosted = used
                self.host_free -= used
                offloaded.append(newest.job_id)
            else:
                newest.computed = 0
                reset.append(newest.job_id)
            rest = starved if items else self.in_order()
            starved = self.schedule_these([job for job in rest if job is not newest], items)
        return [(job.job_id, job.computed, count) for job, count in items], offloaded, reset

    def in_order(self) -> list[Job]:
        def is_decode(job: Job) -> bool:
            return len(job.tokens) - job.computed == 1

        # Stable: within each kind the order of joining remains.
        return sorted(self.active, key=lambda job: is_decode(job) == (self.policy == "prefill_first"))

    def schedule_these(self, jobs: list[Job], items: list[tuple[Job, int]]) -> list[Job]:
        starved = []
        for job in jobs:
            count = self.share_of(job, items)
            if count and self.grow(job, job.computed + count):
                items.append((job, count))
            elif count:
                starved.append(job)
        return starved

    def share_of(self, job: Job, items: list[tuple[Job, int]]) -> int:
        tokens_left = self.limits.max_batch_tokens - sum(count for _, count in items)
        pages_left = self.num_blocks - sum(self.num_pages(j.computed + count) for j, count in items)
        count = min(tokens_left, len(job.tokens) - job.computed)
        fits = len(items) < self.limits.max_requests_per_batch and self.num_pages(job.computed + count) <= pages_left
        return count if fits else 0

    def admit(self, items: list[tuple[Job, int]]) -> None:
        passed: list[Job] = []
        for job in list(self.waiting):
            tokens_left = self.limits.max_batch_tokens - sum(count for _, count in items)
            pages_left = self.num_blocks - sum(self.num_pages(j.computed + count) for j, count in items)
            if tokens_left <= 0 or pages_left <= 0 or len(self.active) == self.limits.max_requests_per_batch:
                return
            if len(passed) == self.limits.max_requests_per_batch:
                return
            if self.active and self.num_free() / self.num_blocks < self.margin - 1e-9:
                return
            # A token is left to compute, or what is on the host has it computed already.
            most = job.computed if job.hosted else len(job.tokens) - 1
            usable = [c for c in self.contents(job.tokens) if len(c) <= most]
            matched: list[Block] = []
            while len(matched) < len(usable) and (block := self.find(usable[len(matched)])) is not None:
                matched.append(block)
            being_computed = [content for other in self.active for content in other.announced]
            if not job.hosted and len(matched) < len(usable) and usable[len(matched)] in being_computed:
                passed.append(job)
                continue
            promised = sum(self.num_pages(len(other.tokens)) - len(other.blocks) for other in self.active)
            own = self.num_pages(len(job.tokens)) - sum(block not in self.cached for block in matched)
            if own + promised > self.num_free():
                return
            self.waiting.remove(job)
            self.active.append(job)
            self.cached = [block for block in self.cached if block not in matched]
            job.blocks, job.computed = matched, max(job.computed, len(matched) * self.page_size)
            if job.hosted:
                self.host_free += job.hosted
                job.hosted = 0
                assert self.grow(job, job.computed)
            for content in self.contents(job.tokens):
                if content not in being_computed and len(content) > job.computed:
                    job.announced.append(content)
            if count := self.share_of(job, items):
                assert self.grow(job, job.computed + count)
                items.append((job, count))

    def update(self, items: list[tuple[int, int, int]]) -> None:
        for job_id, before, count in items:
            job = next(job for job in self.active if job.job_id == job_id)
            job.computed = before + count
            for i, content in enumerate(self.contents(job.tokens)):
                if before < len(content) <= job.computed and self.find(content) is None:
                    job.blocks[i].content = content
            job.announced = [content for content in job.announced if len(content) > job.computed]
            if job.computed < len(job.tokens):
                continue
            failed = job.fails_at == job.end - len(job.tokens)
            if not failed:
                job.tokens.append(toy_model(job.tokens))
            if failed or len(job.tokens) == job.end or (job.eos and job.tokens[-1] == 0):
                self.active.remove(job)
                self.give_back(job, failed=failed)


@dataclass
class Case:
    """A random pool, limits, and requests that come in bit by bit."""

    seed: int

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.page_size = rng.choice([1, 2, 4, 16])
        self.sharing = rng.random() < 0.7
        self.blocks_per_chunk = rng.choice([1, 1, 2, 5])
        headers = [[rng.randrange(7) for _ in range(rng.randrange(25))] for _ in range(3)]
        self.requests: list[Request] = []
        self.failing: dict[int, int] = {}
        for request_id in range(rng.randrange(1, 25)):
            prompt = [*rng.choice(headers), *(rng.randrange(7) for _ in range(rng.randrange(1, 12)))]
            if self.requests and rng.random() < 0.3:
                prompt = list(rng.choice(self.requests).token_ids)
            self.requests.append(make_request(request_id, prompt, rng.randrange(1, 20), eos=rng.random() < 0.3))
            if rng.random() < 0.1:
                self.failing[request_id] = rng.randrange(self.requests[-1].max_tokens)
        longest = max(r.num_prompt_tokens + r.max_tokens - 1 for r in self.requests)
        smallest = -(-longest // (self.page_size * self.blocks_per_chunk))
        self.num_chunks = max(1, int(smallest * rng.choice([1, 1, 1, 1.2, 1.5, 3])))
        self.num_blocks = self.num_chunks * self.blocks_per_chunk
        self.num_layers = rng.choice([1, 3])
        self.limits = StepLimits(
            max_batch_tokens=rng.choice([1, 2, 3, self.page_size, rng.randrange(1, 65)]),
            max_requests_per_batch=rng.randrange(1, 9),
            max_pages_read=self.num_blocks * self.num_layers,
        )
        self.policy = rng.choice(["fifo", "prefill_first"])
        self.safety_margin = rng.choice([0.0, 0.15, 0.5])
        self.num_host_blocks = rng.choice([0, 1, 2, 3, 4, 6, 10, 100])

    def harness(self) -> Harness:
        cache = make_cache(
            self.num_chunks,
            self.page_size,
            blocks_per_chunk=self.blocks_per_chunk,
            num_layers=self.num_layers,
            sharing=self.sharing,
        )
        return Harness(
            cache,
            self.limits,
            self.failing,
            policy=self.policy,
            safety_margin=self.safety_margin,
            num_host_pages=self.num_host_blocks * self.num_layers,
        )

    def job(self, request: Request) -> Job:
        end = request.num_prompt_tokens + request.max_tokens
        fails_after = self.failing.get(request.request_id)
        return Job(
            job_id=request.request_id,
            tokens=list(request.token_ids),
            end=end,
            eos=bool(request.stopping.eos_token_ids),
            fails_at=None if fails_after is None else request.max_tokens - fails_after,
        )


def triples(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(item.request.request_id, item.num_computed_before, item.num_tokens) for item in plan.items]


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 100, 20)])
def test_every_step_is_the_plodding_ones_and_every_token_the_models(seeds: range) -> None:
    totals = {"resets": 0, "offloads": 0, "cached": 0, "failed": 0}
    for seed in seeds:
        case = Case(seed)
        harness = case.harness()
        twin = Twin(case)
        coming = list(case.requests)
        while coming or harness.scheduler.has_work:
            for _ in range(case.rng.randrange(4)):
                if coming:
                    twin.waiting.append(case.job(coming[0]))
                    harness.add(coming.pop(0))
            if not harness.scheduler.has_work:
                continue
            assert harness.num_steps < 5_000, f"seed {seed} does not end"
            expected, offloaded, reset = twin.schedule()
            plan = harness.step()
            assert triples(plan) == expected, f"seed {seed}"
            assert (plan.moves.num_offloads, plan.moves.num_soft_resets) == (len(offloaded), len(reset))
            assert harness.scheduler.offload.num_free_host_pages == twin.host_free * case.num_layers
            twin.update(expected)
            assert [r.request_id for r in harness.scheduler.waiting] == [job.job_id for job in twin.waiting]
            assert [r.request_id for r in harness.scheduler.active] == [job.job_id for job in twin.active]
            assert harness.cache.usage == pytest.approx(len(twin.owned()) / case.num_blocks)
        check_results(case, harness)
        totals["resets"] += harness.num_soft_resets
        totals["offloads"] += harness.num_offloads
        totals["cached"] += sum(r.cached_tokens for r in case.requests)
        totals["failed"] += len(case.failing)
    assert all(totals.values()), f"the cases are too tame: {totals}"


def check_results(case: Case, harness: Harness) -> None:
    """Every request ended with the toy model's own tokens, and its counts add up."""
    assert {f.request.request_id for f in harness.finished} == {r.request_id for r in case.requests}
    for request, outcome in ((f.request, f.outcome) for f in harness.finished):
        prompt, generated = request.prompt.token_ids, request.token_ids[request.num_prompt_tokens :]
        expected = completion(prompt, request.max_tokens, eos=bool(request.stopping.eos_token_ids))
        fails_after = case.failing.get(request.request_id, request.max_tokens)
        assert generated == expected[:fails_after]
        assert isinstance(outcome, RowError) == (fails_after < len(expected))
        # Each token's KV but the last one's is computed once or found, and once more for each reset at most.
        num_stored = len(prompt) + len(generated) - (0 if isinstance(outcome, RowError) else 1)
        assert request.cached_tokens + request.computed_tokens == num_stored
        assert request.cached_tokens < len(prompt)
        assert request.recomputed_tokens <= request.preemptions * num_stored
        assert len(request.token_times) == len(generated)
    runner = harness.runner
    num_rejected = runner.num_drafted - runner.num_accepted
    num_kept = sum(r.computed_tokens + r.recomputed_tokens for r in case.requests)
    assert runner.num_computed == num_kept + num_rejected + harness.num_dropped
    assert harness.num_soft_resets + harness.num_offloads == sum(r.preemptions for r in case.requests)
    if not harness.num_soft_resets:
        assert all(r.recomputed_tokens == 0 for r in case.requests)


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 40, 20)])
def test_hybrid_caches_give_every_request_the_models_tokens(seeds: range) -> None:
    """Full and sliding layers on one pool: no twin, but every slot in a window holds what it should."""
    totals = {"resets": 0, "offloads": 0}
    for seed in seeds:
        case = Case(seed)
        rng = random.Random(seed)
        windows = [rng.choice([None, 3, 3, 8]) for _ in range(rng.randrange(1, 5))]
        for request in case.requests:
            request.tables = [make_table() for _ in group_layers(windows, MAX_MODEL_LEN)]
        longest = max(r.num_prompt_tokens + r.max_tokens - 1 for r in case.requests)
        cache = next(c for n in itertools.count(1) if (c := hybrid(case, windows, n)).max_tokens_ever >= longest)
        all_pages = cache.pool.num_usable * cache.pool.pages_per_chunk
        limits = replace(case.limits, max_requests_per_batch=8, max_pages_read=all_pages)
        margin, num_host_pages = rng.choice([0.0, 0.0, 0.15]), rng.choice([0, 0, 20, 100])
        harness = Harness(cache, limits, case.failing, case.policy, margin, num_host_pages)
        harness.add(*case.requests)
        harness.run(5_000)
        check_results(case, harness)
        totals["resets"] += harness.num_soft_resets
        totals["offloads"] += harness.num_offloads
    assert all(totals.values()), f"the cases are too tame: {totals}"


def hybrid(case: Case, windows: list[int | None], num_blocks: int) -> CacheManager:
    return build_cache(
        windows,
        num_blocks=num_blocks,
        page_size=case.page_size,
        max_batch_tokens=case.limits.max_batch_tokens,
        max_model_len=MAX_MODEL_LEN,
        allow_block_sharing=case.sharing,
    )
