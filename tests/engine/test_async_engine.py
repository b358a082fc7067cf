"""An engine whose steps are launched before the results of the last one are there gives what one that waits gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor

from cbatch.config import SamplingParams
from cbatch.engine.batch import StepInputs
from cbatch.engine.engine import Engine
from cbatch.engine.grammar import is_installed
from cbatch.engine.observer import StepRecord
from cbatch.engine.request import Prompt, RequestMetrics, RequestOutput
from cbatch.engine.runner import ModelRunner
from cbatch.engine.transfers import Fetched, Transfers
from cbatch.models.load import LoadedModel
from tests.engine.late import run_ahead
from tests.engine.test_graphs import Recorder, replay
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import EOS_ID, build_tiny

PAGE_SIZE = 4
POOLS, CHUNKS, HOST_GIB = (40, 56, 400), (3, 17, 512), (0.0, 1e-3)
FACTORS = [POOLS, CHUNKS, (True, False), ("fifo", "prefill_first", "offline"), HOST_GIB, ("given", "shuffled"), (3, 64)]
CASES = list(AllPairs(FACTORS))
FAILS_AT = 121  # the position whose logits are not finite: only the longest row comes there


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny("llama", tmp_path_factory.mktemp("llama")))


def make_prompts() -> list[Prompt]:
    """Whatever a row may ask for, on both sides of page borders, some with a prefix in common."""
    header = make_tokens(30, seed=99)
    asked = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=25, temperature=1.5, seed=3, n=3),
        SamplingParams(max_tokens=40, temperature=2.0, seed=4, stop=("e", "a", "\u00e9", "1")),
        SamplingParams(
            max_tokens=40, temperature=1.5, seed=5, stop=("t",), min_tokens=7, include_stop_str_in_output=True
        ),
        SamplingParams(max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=16, frequency_penalty=0.7, presence_penalty=0.2, temperature=0.8, seed=6),
        SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=8, logprobs=0, prompt_logprobs=1, temperature=1.0, top_k=20, top_p=0.9, seed=7),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=14, logit_bias=((EOS_ID, 100.0),), min_tokens=3),  # and not one more
        SamplingParams(
            max_tokens=30, temperature=2.0, min_p=0.02, seed=8, stop_token_ids=tuple(range(20, 60)), logprobs=1
        ),
        SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1),  # comes to FAILS_AT
        SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=9, logprobs=0),
    ]
    if is_installed():
        asked.append(SamplingParams(max_tokens=30, temperature=2.0, seed=10, regex="[a-c]{2,9}"))
        asked.append(SamplingParams(max_tokens=30, temperature=2.0, seed=11, choice=("yes", "no", "perhaps")))
    lengths = [1, 4, 9, 17, 3, 8, 16, 5, 13, 12, 2, 7, FAILS_AT - 5, 31, 6, 11]
    return [
        Prompt(
            i, (header[: length // 2] if i % 3 else []) + make_tokens(length - (length // 2 if i % 3 else 0), seed=i), p
        )
        for i, (length, p) in enumerate(zip(lengths, asked, strict=False))
    ]


def break_a_row(engine: Engine) -> None:
    """Let the logits behind position FAILS_AT be no numbers."""
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    forward = runner._forward

    def broken(inputs: StepInputs) -> Tensor:
        logits = forward(inputs)
        wanted = inputs.logits_indices if len(inputs.logits_indices) else inputs.logits_indices.new_zeros(1)
        logits[inputs.position_ids[0, wanted] == FAILS_AT] = float("nan")
        return logits

    runner._forward = broken  # type: ignore[method-assign]


def make(loaded: LoadedModel, **settings: object) -> Engine:
    given = {"page_size": PAGE_SIZE, "num_blocks": 400, "safety_margin": 0.0, "speculation": False} | settings
    engine = make_engine(loaded, **given)
    break_a_row(engine)
    return engine


def told(output: RequestOutput) -> RequestOutput:
    """A result without what depends on when the row ran."""
    samples = tuple(told(sample) for sample in output.samples)
    return replace(output, metrics=RequestMetrics(), samples=samples, error=None)


def check_counts(output: RequestOutput) -> None:
    """Every token but the last was computed or found once, and came at a time of its own."""
    metrics = output.metrics
    if output.samples:
        for sample in output.samples:
            check_counts(sample)
    elif output.token_ids or output.error is not None:
        num_stored = output.num_prompt_tokens + len(output.token_ids) - (0 if output.error else 1)
        assert metrics.cached_tokens + metrics.computed_tokens == num_stored
        assert metrics.token_times is not None
        assert len(metrics.token_times) == len(output.token_ids)
        assert list(metrics.token_times) == sorted(metrics.token_times)


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[RequestOutput]:
    return [told(output) for output in run(make(loaded), *make_prompts())]


@pytest.mark.parametrize(("pool", "chunk", "sharing", "policy", "host", "order", "max_requests"), CASES)
def test_outputs_are_those_of_an_engine_that_waits(
    loaded: LoadedModel,
    expected: list[RequestOutput],
    pool: int,
    chunk: int,
    sharing: bool,
    policy: str,
    host: float,
    order: str,
    max_requests: int,
) -> None:
    engine = make(
        loaded,
        num_blocks=pool,
        max_batch_tokens=chunk,
        max_requests_per_batch=max_requests,
        allow_block_sharing=sharing,
        scheduler_type=policy,
        cpu_offload_space=host,
    )
    device = run_ahead(engine)
    prompts = make_prompts()
    if order == "shuffled":
        random.Random(pool + chunk).shuffle(prompts)
    outputs = run(engine, *prompts)
    assert [told(output) for output in outputs] == expected
    for output in outputs:
        check_counts(output)
    assert device.longest == 2
    assert device.num_carried > 30
    assert not device.queue
    assert engine._cache.usage == 0
    stats = engine.stats
    assert stats.output_tokens == sum(len(s.token_ids) for o in outputs for s in (o.samples or (o,)))
    assert stats.offloads == stats.restores


def test_the_rows_are_not_tame(loaded: LoadedModel, expected: list[RequestOutput]) -> None:
    """Some end by themselves, some by a stop string or token, some fail; and in a small pool some move out."""
    assert {output.finish_reason for output in expected} == {"stop", "length", "error"}
    assert {type(output.stop_reason) for output in expected} == {str, int, type(None)}
    for host in HOST_GIB:
        num_moved = 0
        for pool in POOLS[:2]:
            engine = make(loaded, num_blocks=pool, cpu_offload_space=host)
            run_ahead(engine)
            run(engine, *make_prompts())
            num_moved += engine.stats.offloads if host else engine.stats.soft_resets
        assert num_moved > 0


@pytest.mark.parametrize("num_blocks", POOLS)
def test_replayed_steps_take_turns_in_two_sets_of_buffers(
    loaded: LoadedModel, expected: list[RequestOutput], num_blocks: int
) -> None:
    engine, recorder = make(loaded, num_blocks=num_blocks), Recorder()
    replay(engine, recorder, sets=2)
    run_ahead(engine)
    assert [told(output) for output in run(engine, *make_prompts())] == expected
    assert recorder.num_replays > 3


def test_one_set_of_buffers_would_be_written_while_a_step_reads_it(llama: LoadedModel) -> None:
    prompts = [Prompt(i, make_tokens(5, seed=i), SamplingParams(max_tokens=12, ignore_eos=True)) for i in range(3)]
    outputs = []
    for sets in (1, 2):
        engine, recorder = make(llama), Recorder()
        replay(engine, recorder, sets=sets)
        run_ahead(engine)
        outputs.append([output.token_ids for output in run(engine, *prompts)])
    alone = [output.token_ids for output in run(make(llama), *prompts)]
    assert outputs[1] == alone
    assert outputs[0] != alone


class Failing(Transfers):
    """Finds no memory for results at the last moment, when everything else of the step has been done."""

    def __init__(self, fails: Sequence[bool]) -> None:
        """`fails` says of one step after another whether it does."""
        self._fails = iter(fails)

    def fetch(self, results: Sequence[Tensor]) -> Fetched:
        if next(self._fails, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().fetch(results)


@pytest.mark.parametrize("num_failures", [1, 3])
def test_memory_that_runs_out_halves_a_step_behind_the_one_in_flight(
    loaded: LoadedModel, expected: list[RequestOutput], num_failures: int
) -> None:
    engine, recorder = make(loaded, max_batch_tokens=32), Recorder()
    replay(engine, recorder, sets=2)
    engine._most_in_flight = 1
    transfers = Failing([False] * 5 + [True, False, False] * num_failures)
    assert isinstance(engine._runner, ModelRunner)
    engine._runner._transfers = transfers
    assert [told(output) for output in run(engine, *make_prompts())] == expected
    assert engine.stats.out_of_memory_steps == num_failures
    assert engine._scheduler.limits.max_batch_tokens == 32 >> num_failures


def test_a_caller_that_stops_early_leaves_nothing_behind(loaded: LoadedModel, expected: list[RequestOutput]) -> None:
    engine = make(loaded, num_blocks=80)
    device = run_ahead(engine)
    for num_steps in (1, 2, 5, 9):
        steps = engine.steps(iter(make_prompts()))
        for _ in range(num_steps):
            next(steps)
        steps.close()
        assert not device.queue, "nobody writes where a step in flight reads"
        assert engine._cache.usage == 0
    assert [told(output) for output in run(engine, *make_prompts())] == expected


def test_an_interrupt_in_the_middle_of_a_step_leaves_nothing_behind(
    loaded: LoadedModel, expected: list[RequestOutput]
) -> None:
    engine = make(loaded)
    run_ahead(engine)
    update, calls = engine._scheduler.update, iter([False] * 4 + [True])

    def interrupted(*arguments):  # type: ignore[no-untyped-def]
        if next(calls, False):
            raise KeyboardInterrupt
        return update(*arguments)

    engine._scheduler.update = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(engine, *make_prompts())
    assert [told(output) for output in run(engine, *make_prompts())] == expected


def test_what_waits_can_be_dropped_while_a_step_is_in_flight(llama: LoadedModel) -> None:
    engine = make(llama, max_requests_per_batch=2)
    run_ahead(engine)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    steps = engine.steps(Prompt(i, make_tokens(5, seed=i), params) for i in range(5))
    outputs = [*next(steps), *next(steps)]
    assert engine._scheduler.num_in_flight == 1
    assert engine.drop_waiting() == [2, 3, 4]
    outputs += [output for finished in steps for output in finished]
    assert [(output.request_id, len(output.token_ids)) for output in outputs] == [(0, 9), (1, 9)]


def test_a_source_that_has_nothing_ready_waits_for_nothing_in_flight(llama: LoadedModel) -> None:
    def slow() -> Iterator[Prompt | None]:
        for i in range(3):
            yield from [None] * (2 + 3 * i)
            yield Prompt(i, make_tokens(5, seed=i), SamplingParams(max_tokens=4, ignore_eos=True))

    engine = make(llama)
    run_ahead(engine)
    outputs = [output for finished in engine.steps(slow()) for output in finished]
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4]


def test_a_step_that_lacks_prompts_counts_once(llama: LoadedModel) -> None:
    """Though the engine looks for prompts when it launches one, and when it waits for its results."""

    def slow() -> Iterator[Prompt | None]:
        yield Prompt(0, make_tokens(5, seed=0), SamplingParams(max_tokens=6, ignore_eos=True, repetition_penalty=1.3))
        yield from [None] * 20

    engine = make(llama)
    run_ahead(engine)
    for _ in engine.steps(slow()):
        pass
    assert engine.stats.starved_steps == engine.stats.steps == 6


def test_an_observer_sees_steps_one_after_another(llama: LoadedModel) -> None:
    records: list[StepRecord] = []

    class Notes:
        def on_step(self, record: StepRecord) -> None:
            records.append(record)

    engine = make(llama, num_blocks=POOLS[0])
    run_ahead(engine)
    engine.observe(Notes())
    outputs = run(engine, *make_prompts())
    assert len(records) == engine.stats.steps
    ends = 0.0
    for times in (record.times for record in records):
        assert ends <= times.began <= times.scheduled <= times.ran <= times.ended
        ends = times.ended
    for output in outputs:
        for sample in range(max(1, len(output.samples))):
            events = [e for r in records for e in r.events if (e.request_id, e.sample) == (output.request_id, sample)]
            assert [event.at for event in events] == sorted(event.at for event in events)
            assert [event.state.value for event in events][:2] == ["pending", "prefilling"]
            assert [event.state.value for event in events][-1] == "finished"
            assert [event.state.value for event in events].count("finished") == 1
