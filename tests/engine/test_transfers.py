"""Copies on streams of their own: none overtakes what it copies, and no buffer is written while a step reads it.

On a device that notes every access; see streams.py. Everything that the engine does with tensors is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cbatch.config import SamplingParams
from cbatch.engine import transfers
from cbatch.engine.batch import StepInputs
from cbatch.engine.engine import Engine
from cbatch.engine.offload import PageCopies
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.runner import ModelRunner
from cbatch.engine.step import StepPlan
from cbatch.engine.transfers import StreamTransfers, Transfers, page_runs
from cbatch.models.load import LoadedModel
from tests.engine.streams import FakeStream, Streams
from tests.engine.test_graphs import Recorder, replay
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import build_tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    device = Streams()
    cuda = SimpleNamespace(
        Stream=device.Stream,
        stream=device.stream,
        current_stream=device.current_stream,
        synchronize=device.synchronize,
    )
    monkeypatch.setattr(transfers, "torch", SimpleNamespace(cuda=cuda, tensor=torch.tensor))
    monkeypatch.setattr(transfers, "_pinned_like", torch.empty_like)
    monkeypatch.setattr(transfers, "_keep_for", lambda tensor, stream: None)
    return device


def rows() -> list[Prompt]:
    """Enough for a small cache to move some out and back, with every kind of result."""
    asked = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=1.5, top_k=30, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=0, ignore_eos=True),
        SamplingParams(max_tokens=14, repetition_penalty=1.2, ignore_eos=True),
    ]
    return [Prompt(i, make_tokens(5 + 3 * i, seed=i), asked[i % 4]) for i in range(8)]


def make(loaded: LoadedModel) -> Engine:
    settings = {"page_size": 4, "num_blocks": 26, "safety_margin": 0.0, "cpu_offload_space": 1e-3}
    return make_engine(loaded, speculation=False, **settings)


def run_beside(
    engine: Engine, device: Streams, sets: int = 2, prompts: Sequence[Prompt] | None = None
) -> list[RequestOutput]:
    """Run ahead over graphs and streams, with all that kernels read noted as well."""
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    forward = runner._forward

    def noted(inputs: StepInputs) -> Tensor:
        for part in inputs.attention:
            tensors = (part.slot_mapping, part.metadata.block_tables, part.metadata.context_lens)
            device.read("attention", [*tensors, inputs.input_ids, inputs.position_ids])
        device.read("attention", [runner.key_pages, runner.value_pages])
        return forward(inputs)

    runner._forward = noted  # type: ignore[method-assign]
    replay(engine, Recorder(), sets=sets)
    runner.transfer_beside()
    engine._most_in_flight = 1
    with device:
        return run(engine, *(prompts or rows()))


def test_nothing_is_read_or_written_beside_what_another_stream_does_with_it(
    loaded: LoadedModel, streams: Streams
) -> None:
    expected = [(o.token_ids, o.logprobs, o.prompt_logprobs) for o in run(make(loaded), *rows())]
    engine = make(loaded)
    outputs = run_beside(engine, streams)
    assert [(o.token_ids, o.logprobs, o.prompt_logprobs) for o in outputs] == expected
    assert engine.stats.offloads > 0
    assert len(streams.used) == 4, "inputs, results, pages and the forward pass have a stream each"
    assert streams.races == []


def test_one_set_of_buffers_is_seen_to_be_written_while_a_step_reads_it(loaded: LoadedModel, streams: Streams) -> None:
    run_beside(make(loaded), streams, sets=1)
    assert any("stream" in race for race in streams.races)


def test_a_step_that_an_interrupt_lost_is_waited_for(loaded: LoadedModel, streams: Streams) -> None:
    engine = make(loaded)
    launch, calls = engine._scheduler.launch, iter([False] * 5 + [True])

    def interrupted(plan: StepPlan) -> None:
        if next(calls, False):
            raise KeyboardInterrupt
        launch(plan)

    engine._scheduler.launch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_beside(engine, streams, prompts=rows()[:2])  # which decode from the second step on
    with streams:
        run(engine, *rows()[:2])  # whose second step has the buffers of the lost one
    assert streams.races == []


@pytest.mark.parametrize("forgotten", ["await_upload", "fetch", "page_out", "page_in"])
def test_a_wait_that_is_left_out_is_noticed(
    loaded: LoadedModel, streams: Streams, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    original: Callable[..., object] = getattr(StreamTransfers, forgotten)

    def without_waits(self: StreamTransfers, *arguments: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(FakeStream, "wait_stream", lambda self, other: None)
            return original(self, *arguments)

    monkeypatch.setattr(StreamTransfers, forgotten, without_waits)
    run_beside(make(loaded), streams)
    assert streams.races


@pytest.mark.parametrize("host_pages", [[0], [3, 4, 5], [5, 3, 4], [9, 1, 8, 2, 5], list(range(9, -1, -1))])
def test_pages_lie_on_the_host_and_in_the_cache_as_with_one_queue(streams: Streams, host_pages: Sequence[int]) -> None:
    copies = PageCopies([11 - i for i in range(len(host_pages))], list(host_pages))
    found = []
    for way in (Transfers(), StreamTransfers()):
        cache, host = torch.arange(24.0).reshape(12, 2), torch.zeros(10, 2)
        way.page_out(cache, host, copies)
        left = cache.clone()
        cache.zero_()
        way.page_in(cache, host, copies)
        assert torch.equal(cache[copies.cache_pages], left[copies.cache_pages])
        found.append((cache, host))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("pages", "runs"),
    [([], []), ([4], [(0, 4, 1)]), ([7, 5, 6], [(0, 5, 3)]), ([1, 9, 2, 8, 4], [(0, 1, 2), (2, 4, 1), (3, 8, 2)])],
)
def test_pages_of_the_host_are_copied_run_by_run(pages: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert page_runs(pages) == runs
