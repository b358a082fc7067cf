"""The whole engine over kernels in Triton, under its interpreter: the tokens of the references, from every kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cbatch_kernels import shared_prefix, triton_attention, triton_rows

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt
from tests.engine.reference import count_near_ties, generate_references
from tests.engine.test_graphs import Recorder, replay
from tests.engine.tiny_engine import load_tiny, make_engine, make_tokens, run
from tests.tiny_models import build_tiny

pytest.importorskip("triton")


@pytest.fixture
def launched(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel is launched."""
    counts: Counter[str] = Counter()
    original = triton_rows.launch

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        counts[kernel.fn.__name__] += 1
        original(kernel, grid, *arguments, **constants)

    for module in (triton_attention, triton_rows):
        monkeypatch.setattr(module, "launch", launch)
    return counts


ATTENTION = {"attend", "rope_cache_write"}
PATCHED = ATTENTION | {"rms_norm", "activate_and_multiply"}


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", PATCHED),
        ("gemma2", PATCHED),  # soft-cap
        ("gemma3", PATCHED),  # windows beside full attention, norms of heads
        ("gpt_oss", ATTENTION | {"rms_norm"}),  # sinks
        ("gpt2", ATTENTION),  # runs unpatched
    ],
)
def test_tokens_equal_those_of_generate(family: str, kernels: set[str], launched: Counter[str], tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path)
    loaded = load_tiny(folder)
    prompts, max_tokens = [make_tokens(n, seed=n) for n in (3, 22, 5)], [3, 2, 2]
    references = generate_references(folder, prompts, max_tokens)
    engine = Engine.over(
        loaded, EngineConfig(model=str(folder), num_blocks=64, page_size=8, max_batch_tokens=14, speculation=False)
    )
    launched.clear()  # of the self-check
    rows = (
        Prompt(i, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=True))
    )
    outputs = run(engine, *rows)
    assert count_near_ties(references, [output.token_ids for output in outputs]) == 0
    assert set(launched) == kernels
    layers = loaded.shape.num_layers
    assert launched["attend"] >= engine.stats.steps * layers
    assert launched["rope_cache_write"] == engine.stats.steps * layers
    assert engine.plan.attention == "Triton"


# Rows of padding read a page that nothing was written to.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_rows_that_begin_alike_attend_to_that_together_in_replayed_steps_too(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_ROWS", 2)
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 1)
    loaded = load_tiny(build_tiny("llama", tmp_path))
    common = make_tokens(24)
    rows = [
        Prompt(i, [*common, *make_tokens(1 + i, seed=i)], SamplingParams(max_tokens=2 + i, ignore_eos=True))
        for i in range(3)
    ]
    settings = {"page_size": 8, "speculation": False, "max_requests_per_batch": 3}
    with monkeypatch.context() as compiled:
        compiled.delenv("TRITON_INTERPRET")
        expected = [output.token_ids for output in run(make_engine(loaded, **settings), *rows)]
    launched.clear()
    engine, device = make_engine(loaded, **settings), Recorder()
    replay(engine, device, rows=3)
    assert [output.token_ids for output in run(engine, *rows)] == expected
    assert len(device.rows) == 2, "a shape where they begin alike, and one for the last row alone"
    assert launched["attend_prefixes"] >= (device.num_replays - 1) * loaded.shape.num_layers
