"""Made-up steps: of the size that is planned for, measured one by one, with a reader of memory that is the test's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cbatch.config import EngineConfig
from cbatch.engine.batch import StepInputs
from cbatch.engine.plan import plan_engine
from cbatch.engine.rehearsal import FRAGMENTS, MeasuredSteps, measure_steps
from cbatch.engine.runner import ModelRunner
from cbatch.engine.sizing import cache_bytes, captured_logits_bytes
from cbatch.models.load import LoadedModel
from cbatch.models.memory import FreeMemory
from cbatch.units import GIB
from tests.engine.test_plan import LARGE, ON_DEVICE
from tests.engine.tiny_engine import load_tiny
from tests.tiny_models import build_tiny


class Memory:
    """Says of each measured step what it took."""

    def __init__(self, *most: int) -> None:
        self._most = list(most)
        self.began = 0

    def begin(self) -> None:
        self.began += 1

    def most(self) -> int:
        return self._most[self.began - 1]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(build_tiny(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[StepInputs]:
    steps: list[StepInputs] = []
    original = ModelRunner.rehearse

    def rehearse(self: ModelRunner, inputs: StepInputs) -> None:
        steps.append(inputs)
        original(self, inputs)

    monkeypatch.setattr(ModelRunner, "rehearse", rehearse)
    return steps


def test_the_largest_step_and_the_largest_that_decodes_are_run(
    loaded: LoadedModel, rehearsed: list[StepInputs]
) -> None:
    found = measure_steps(loaded, Memory(3000, 1000), 40, 8, 97, 5)
    assert found == MeasuredSteps(largest=int(3000 * FRAGMENTS), decoding=int(1000 * FRAGMENTS))
    prompts, decoding = rehearsed
    assert prompts.attention[0].metadata.query_lens_host.tolist() == [17, 40, 40], "no context is longer than may be"
    assert [step.input_ids.shape[1] for step in rehearsed] == [97, 5]
    assert [len(step.logits_indices) for step in rehearsed] == [5, 5]
    assert decoding.attention[0].metadata.num_decode_rows == 5


def test_where_memory_runs_out_nothing_is_told(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "rehearse", fail)
    assert measure_steps(loaded, Memory(1, 1), 40, 8, 20, 5) is None
    assert "made-up step of 20 tokens" in caplog.text


@pytest.mark.parametrize("measured", [MeasuredSteps(5 * GIB, GIB), None], ids=["measured", "out of memory"])
def test_the_cache_gets_what_the_measured_steps_and_graphs_leave(
    tmp_path: Path, measured: MeasuredSteps | None
) -> None:
    tiny = load_tiny(build_tiny("llama", tmp_path))
    model = replace(tiny, shape=LARGE, dtype=torch.bfloat16, device=torch.device("cuda"))
    asked: list[tuple[int, int]] = []

    def measure(num_tokens: int, num_requests: int) -> MeasuredSteps | None:
        asked.append((num_tokens, num_requests))
        return measured

    config, memory = EngineConfig(model="tiny", max_requests_per_batch=256), FreeMemory(60 * GIB, "free on the GPU")
    plan = plan_engine(config, model, memory, ON_DEVICE, measure=measure)
    assert asked == [(plan.max_batch_tokens, 256)]
    assert plan.use_async_batching
    if measured is None:
        assert plan == plan_engine(config, model, memory, ON_DEVICE)
        return
    graphs = GIB + 2 * captured_logits_bytes(LARGE, torch.bfloat16, max_requests=256, interval=16)

    def taken(num_blocks: int) -> int:
        return 5 * GIB + graphs + cache_bytes(LARGE, torch.bfloat16, plan.page_size, num_blocks, LARGE.num_layers)

    assert taken(plan.num_blocks) <= 0.9 * 60 * GIB < taken(plan.num_blocks + 1)
    assert plan.reasons["num_blocks"].startswith("what a measured step leaves of")


def test_captured_steps_write_their_logits_to_one_place() -> None:
    assert captured_logits_bytes(LARGE, torch.bfloat16, max_requests=40, interval=16) == 48 * 128256 * 2
