"""Replayed decode steps give the tokens of steps that run as they are: on a device that records in CUDA's place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine import graphs
from cbatch.engine.engine import Engine
from cbatch.engine.graphs import Graph
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.runner import ModelRunner
from cbatch.errors import UsageError
from cbatch.models.load import LoadedModel
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import build_tiny


class Recorder:
    """Runs what was recorded again, over the tensors that it was recorded with, into the same result."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # of each captured shape, in order
        self.num_replays = 0
        self.stores: set[int] = set()  # where logits lie

    def capture(self, body: Callable[[], Tensor]) -> Graph:
        logits = body()
        self.stores.add(logits.data_ptr())
        self.rows.append(logits.shape[0])

        def replay() -> None:
            self.num_replays += 1
            logits.copy_(body())

        return Graph(replay, logits)


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral_window", "gpt2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny(request.param, tmp_path_factory.mktemp(request.param)))


def replay(engine: Engine, device: Recorder, *, rows: int = 4, blocks: int = 64, sets: int = 1) -> None:
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    runner.replay_on(
        device,
        max_rows=engine.plan.max_requests_per_batch,
        q_padding_interval_size=rows,
        kv_padding_interval_size=blocks,
        num_sets=sets,
    )


def prompts() -> list[Prompt]:
    """Rows that come and go at different steps, sampled and greedy, with stops."""
    lengths = (1, 3, 17, 40, 9, 64, 5, 30, 2)
    return [
        Prompt(
            i,
            make_tokens(length, seed=i),
            SamplingParams(max_tokens=4 + 5 * i, ignore_eos=i % 2 == 0, temperature=float(i % 3 == 1), seed=i),
        )
        for i, length in enumerate(lengths)
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 4, "max_batch_tokens": 12},
        {"page_size": 4, "num_blocks": 30, "safety_margin": 0.0},  # requests move out
        {"page_size": 4, "num_blocks": 30, "safety_margin": 0.0, "cpu_offload_space": 0.01},
        {"max_requests_per_batch": 3, "scheduler_type": "prefill_first"},
    ],
    ids=str,
)
def test_replayed_steps_give_the_same_tokens(loaded: LoadedModel, settings: dict[str, object]) -> None:
    expected = tokens(run(make_engine(loaded, speculation=False, **settings), *prompts()))
    engine, device = make_engine(loaded, speculation=False, **settings), Recorder()
    replay(engine, device)
    assert tokens(run(engine, *prompts())) == expected
    assert device.num_replays > engine.stats.steps / 3
    assert len(device.rows) < device.num_replays / 2
    assert device.rows[0] == max(device.rows), "the largest comes first"
    assert len(device.stores) == 1, "all leave their logits in one place"
    assert all(count % 4 == 0 for count in device.rows)


def test_steps_with_drafts_or_scores_run_as_they_are(loaded: LoadedModel) -> None:
    rows = [Prompt(0, [7, 9, 9, 9], SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=1))]
    rows.append(Prompt(1, [7, 8] * 6, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)))
    expected = run(make_engine(loaded, speculation=True), *rows)
    engine, device = make_engine(loaded, speculation=True), Recorder()
    replay(engine, device)
    outputs = run(engine, *rows)
    assert device.num_replays == 0
    assert tokens(outputs) == tokens(expected)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]


def test_what_cannot_be_captured_runs_as_it_is_and_says_so(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(Recorder):
        def capture(self, body: Callable[[], Tensor]) -> Graph:
            raise RuntimeError("operation not permitted when stream is capturing")

    expected = tokens(run(make_engine(loaded, speculation=False), *prompts()))
    engine, device = make_engine(loaded, speculation=False), Refuses()
    replay(engine, device)
    with caplog.at_level(logging.WARNING):
        assert tokens(run(engine, *prompts())) == expected
    assert device.num_replays == 0
    assert caplog.text.count("run without CUDA graphs: operation not permitted") == 1


def test_no_more_graphs_are_kept_than_there_may_be(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    expected = tokens(run(make_engine(loaded, speculation=False), *prompts()))
    engine, device = make_engine(loaded, speculation=False), Recorder()
    replay(engine, device, rows=1)
    assert tokens(run(engine, *prompts())) == expected
    assert len(device.rows) == 1


def test_without_a_gpu_they_are_off_and_asking_for_them_is_refused(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path)
    engine = make_engine(load_tiny(folder))
    assert not engine.plan.use_cuda_graph
    assert engine.plan.reasons["use_cuda_graph"] == "off: there is no CUDA device"
    with pytest.raises(UsageError, match="use_cuda_graph needs a CUDA device"):
        Engine.load(EngineConfig(model=str(folder), device="cpu", use_cuda_graph=True))
