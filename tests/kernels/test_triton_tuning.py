"""Which tiles are timed and used: with a clock of the test's, and a card that is not there."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from cbatch_kernels.tuned_choices import TunedChoices, Values

from tests.kernels.oracle import TOLERANCE, Variant, attend, build_case

pytest.importorskip("triton")
from cbatch_kernels import triton_attention, triton_tiles, triton_tuning

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = (32, 8, 64)
BF16 = torch.bfloat16


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Values]]:
    """What is timed; the last candidate is the fastest."""
    ran: list[tuple[str, Values]] = []

    def made_up(_device: object, _dtype: object, _shape: object, step: tuple[int, int, int]) -> object:
        kind = "single" if step[1] == 1 else "prompt"
        return lambda tiles: ran.append((kind, astuple(tiles)))

    monkeypatch.setattr(triton_tuning, "_made_up_step", made_up)
    return ran


def test_prompts_and_single_tokens_get_their_own_tiles_which_are_timed_once(
    timed: list[tuple[str, Values]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "choices.json"
    triton_tuning.tune_tiles(TunedChoices(file), CUDA, BF16, SHAPE, lambda call: [call(), -len(timed)][1])
    single, prompt = (triton_tiles.candidates(BF16, 64, single=is_single) for is_single in (True, False))
    assert [values for kind, values in timed if kind == "single"] == [astuple(tiles) for tiles in single]
    assert [values for kind, values in timed if kind == "prompt"] == [astuple(tiles) for tiles in prompt]
    count = len(timed)
    triton_tuning.tune_tiles(TunedChoices(file), CUDA, BF16, SHAPE, lambda _: pytest.fail("timed twice"))
    assert len(timed) == count
    monkeypatch.setattr(triton_tiles, "choices_of", lambda _: TunedChoices(file))
    triton_tiles.tiles_for.cache_clear()
    expected = replace(
        prompt[-1],
        single_keys=single[-1].single_keys,
        single_warps=single[-1].single_warps,
        single_stages=single[-1].single_stages,
    )
    assert triton_tiles.tiles_for(CUDA, BF16, *SHAPE) == expected
    assert triton_tiles.tiles_for(CUDA, BF16, 16, 8, 64) == triton_tiles.fixed_tiles(BF16, 64), "for another model"
    triton_tiles.tiles_for.cache_clear()


def test_a_device_has_its_cards_choices_however_it_is_spelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index or 0}")
    first, same, other = (triton_tiles.choices_of(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:1"))
    assert first is same is not other
    triton_tiles.choices_for_card.cache_clear()


def test_float32_and_the_interpreter_keep_to_the_fixed_tiles(
    timed: list[tuple[str, Values]], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_tuning.tune_tiles(TunedChoices(None), CUDA, torch.float32, SHAPE, lambda _: 1.0)
    monkeypatch.setattr(triton_tuning, "is_interpreted", lambda: True)
    triton_tuning.tune(CUDA, BF16, *SHAPE)
    assert timed == []


def test_drawing_is_timed_once_and_the_fastest_way_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, ran = tmp_path / "choices.json", []
    monkeypatch.setattr(triton_tuning, "DRAWN", (2, 8))
    monkeypatch.setattr(triton_tuning, "draw_tokens_triton", lambda _logits, _rules, block: ran.append(block))
    for _ in range(2):
        triton_tuning.tune_drawing(TunedChoices(file), CPU, BF16, lambda call: [call(), -len(ran)][1])
    assert ran == list(triton_tiles.DRAW_CANDIDATES)
    monkeypatch.setattr(triton_tiles, "choices_of", lambda _: TunedChoices(file))
    triton_tiles.draw_block.cache_clear()
    assert triton_tiles.draw_block(CUDA, BF16) == triton_tiles.DRAW_CANDIDATES[-1]
    assert triton_tiles.draw_block(CPU, BF16) == triton_tiles.DRAW_CANDIDATES[0]
    triton_tiles.draw_block.cache_clear()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("head_dim", [32, 128])
def test_every_candidate_gives_what_the_oracle_gives(head_dim: int) -> None:
    variant = Variant(dtype=BF16, head_dim=head_dim, num_heads=2, kv_heads=1)
    case = build_case(variant, [(1, 70), (1, 3), (40, 60)])
    expected = attend(case, variant)
    tolerance = TOLERANCE[BF16]
    for is_single in (True, False):
        for tiles in triton_tiles.candidates(BF16, head_dim, single=is_single):
            found = triton_attention.paged_attention_triton(
                case.query, case.key_pages, case.value_pages, case.metadata, scaling=variant.scaling, tiles=tiles
            )
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
