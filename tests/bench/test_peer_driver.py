"""What the processes do, in this one: our modes and generate() on a tiny model, vLLM's interface on a stand-in.

transformers' continuous batching takes most of the machine's memory, and vLLM minutes to load: both are run by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cbatch.bench import peer_driver, worker
from tests.tiny_models import build_tiny

ROWS = [([5, 6, 7], 4), ([8] * 20, 2), ([9, 10], 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


def make_task(folder: Path, **others: Any) -> dict[str, Any]:
    task = {"model": str(folder), "dtype": "float32", "device": "cpu", "trust_remote_code": False, "rows": ROWS}
    return task | {"max_requests": 2, "max_batch_tokens": None, "longest": 22} | others


def check_times(times: list[list[float]]) -> None:
    assert [len(row) for row in times] == [count for _, count in ROWS]
    assert all(row[0] > 0 and row == sorted(row) for row in times)


def test_a_mode_runs_every_row_to_its_number_of_tokens(folder: Path) -> None:
    engine = {"model": str(folder), "num_blocks": 64, "max_requests_per_batch": 2, "max_model_len": 22}
    outcome = worker.run_task(make_task(folder, mode="naive", engine=engine))
    check_times(outcome["token_times"])
    assert max(outcome["token_times"][0]) < min(outcome["token_times"][1])  # one after the other
    assert (outcome["settings"]["num_blocks"], outcome["steps"], outcome["cached_tokens"]) == (64, 4 + 2 + 6, 0)
    assert outcome["load_s"] > 0
    assert outcome["peak_rss_bytes"] > 1 << 20


def test_a_row_that_our_engine_refuses_is_an_error_of_the_run(folder: Path) -> None:
    engine = {"model": str(folder), "num_blocks": 1, "page_size": 16, "max_model_len": 40}
    with pytest.raises(worker.EngineError, match=r"row 1: .*can never fit"):
        worker.run_task(make_task(folder, mode="static", engine=engine))


def test_generate_runs_batches_that_wait_for_their_slowest(folder: Path) -> None:
    outcome = peer_driver.run_task(make_task(folder, peer="transformers"))
    times = outcome["token_times"]
    check_times(times)
    assert times[0][:2] == times[1]  # the same steps
    assert times[2][0] > times[0][-1]  # the next batch
    assert outcome["settings"] == {"batch": 2}
    assert outcome["version"].startswith("transformers ")


class FakeVllm(types.ModuleType):
    """The part of vLLM that the driver uses: requests that get two tokens in a step."""

    __version__ = "0.0"

    def __init__(self) -> None:
        super().__init__("vllm")
        self.given: dict[str, Any] = {}
        self.params: list[dict[str, Any]] = []
        self.num_resets = 0
        self.running: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}

    def LLM(self, model: str, **settings: Any) -> Any:  # noqa: N802
        self.given = {"model": model} | settings
        config = types.SimpleNamespace(get_vocab_size=lambda: 50)
        engine = types.SimpleNamespace(
            model_config=config,
            add_request=self.add,
            has_unfinished_requests=lambda: bool(self.running),
            step=self.step,
        )
        return types.SimpleNamespace(llm_engine=engine, reset_prefix_cache=self.reset)

    def SamplingParams(self, **params: Any) -> dict[str, Any]:  # noqa: N802
        self.params.append(params)
        return params

    def reset(self) -> None:
        self.num_resets += 1

    def add(self, request_id: str, prompt: dict[str, list[int]], params: dict[str, Any]) -> None:
        assert all(0 <= token < 50 for token in prompt["prompt_token_ids"])
        self.running[request_id], self.limits[request_id] = [], params["max_tokens"]

    def step(self) -> list[Any]:
        outputs = []
        for request_id, tokens in list(self.running.items()):
            tokens += [1] * min(2, self.limits[request_id] - len(tokens))
            completion = types.SimpleNamespace(token_ids=list(tokens))
            outputs.append(types.SimpleNamespace(request_id=request_id, outputs=[completion]))
            if len(tokens) == self.limits[request_id]:
                del self.running[request_id]
        return outputs


def test_vllm_is_stepped_and_its_tokens_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    outcome = peer_driver.run_task(make_task(folder, peer="vllm", max_batch_tokens=512))
    check_times(outcome["token_times"])
    assert outcome["token_times"][0][0] == outcome["token_times"][0][1]  # two came in one step
    expected = {"max_num_seqs": 2, "max_num_batched_tokens": 512, "max_model_len": 22, "dtype": "float32"}
    assert expected.items() <= fake.given.items()
    assert all(p["temperature"] == 0 and p["ignore_eos"] for p in fake.params)
    assert [p["max_tokens"] for p in fake.params[-3:]] == [4, 2, 6]
    assert fake.num_resets == 1  # once, after the warm-up


@pytest.mark.parametrize("longest", [2, 5, 1000])
def test_warm_up_rows_fit_what_the_rows_fit_and_share_no_prefix(longest: int) -> None:
    rows = peer_driver.warm_up_rows(100, longest)
    assert all(len(ids) >= 1 and count >= 1 and len(ids) + count <= longest for ids, count in rows)
    assert len({ids[0] for ids, _ in rows}) == len(rows)


def test_the_driver_is_a_program_that_needs_no_cbatch_and_keeps_its_answer_apart(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("print('chatter of a library')\nraise ImportError('one\\nno such library')\n")
    command = [sys.executable, "-S", peer_driver.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(tmp_path)}, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"peer": "vllm"}\n')
        process.stdin.flush()  # and left open: closing it would end the driver, perhaps before it answers
        assert json.loads(process.stdout.read()) == {"error": "ImportError: no such library"}
        assert process.wait(timeout=60) == 0
