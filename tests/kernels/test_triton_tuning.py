"""Which tiles are timed and used: with a clock of the test's, and a card that is not there."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from cbatch_kernels.tuned_choices import ModelSizes, TunedChoices, Values

from tests.kernels.oracle import TOLERANCE, Variant, attend, build_case

pytest.importorskip("triton")
from cbatch_kernels import triton_attention, triton_tiles, triton_tuning

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = (32, 8, 64)
SIZES = ModelSizes(*SHAPE, hidden=2048, intermediate=8192)
SMALL = ModelSizes(4, 2, 16, hidden=24, intermediate=40)
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
    triton_tuning.tune(CUDA, BF16, SIZES)
    assert timed == []


@pytest.mark.parametrize("op", triton_tiles.ROW_CANDIDATES)
def test_rows_of_each_width_are_timed_once_and_the_fastest_way_taken(
    op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, ran = tmp_path / "choices.json", []
    width = 1 << 20
    for _ in range(2):
        steps = iter([(op, 64, lambda: ran.append), (op, width, lambda: ran.append)])
        triton_tuning.tune_rows(TunedChoices(file), BF16, steps, lambda call: [call(), -len(ran)][1])
    narrow, wide = (triton_tiles.row_candidates(op, each) for each in (64, width))
    assert ran == [*narrow, *wide]
    assert len(narrow) > 1
    monkeypatch.setattr(triton_tiles, "choices_of", lambda _: TunedChoices(file))
    triton_tiles.row_choice.cache_clear()
    assert triton_tiles.row_choice(op, CUDA, BF16, 64) == narrow[-1]
    assert triton_tiles.row_choice(op, CUDA, BF16, 65) == narrow[0], "for another model"
    assert triton_tiles.row_choice(op, CPU, BF16, 64) == narrow[0]
    triton_tiles.row_choice.cache_clear()


def test_a_row_is_not_given_fewer_warps_than_hold_it() -> None:
    assert triton_tiles.row_candidates("rms_norm", 4096) == [(4,), (2,), (8,), (16,)]
    assert triton_tiles.row_candidates("rms_norm", 16384) == [(4,), (8,), (16,)]


@pytest.mark.usefixtures("interpreted")
def test_what_is_timed_of_rows_runs_in_every_way_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tuning, "ROWS", triton_tuning.PAGE_SIZE)
    monkeypatch.setattr(triton_tuning, "DRAWN", 100)
    timed = set()
    for op, width, make in triton_tuning.row_steps(CPU, torch.float32, SMALL):
        timed.add((op, width))
        first, *others = (make()(values) for values in triton_tiles.row_candidates(op, width))
        for other in others:
            torch.testing.assert_close(other, first)
    assert {op for op, _ in timed} == set(triton_tiles.ROW_CANDIDATES)
    assert {width for op, width in timed if op == "rms_norm"} == {SMALL.hidden, SMALL.head_dim}


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
