"""The program that measures the engine on a card, tried on the CPU: its floor counts what a step reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.measure_engine import Workload, build_model, measure_engine, share_covered, weight_bytes

SMALL = Workload(
    rows=3,
    prompt=12,
    output=9,
    layers=2,
    hidden=64,
    intermediate=96,
    heads=4,
    kv_heads=2,
    vocab=300,
    dtype="float32",
    device="cpu",
)


def test_it_measures_steps_against_what_they_read(tmp_path: Path) -> None:
    build_model(SMALL, tmp_path)
    figures = measure_engine(SMALL, str(tmp_path))
    step, floor, over = (figures[name] for name in ("step_ms", "floor_ms", "step_over_floor"))
    assert isinstance(step, float)
    assert isinstance(floor, float)
    assert over == pytest.approx(step / floor)
    read = floor * 1e6 * float(str(figures["bandwidth_gb_per_s"]))
    token = 2 * SMALL.layers * SMALL.kv_heads * 16 * 4
    assert weight_bytes(SMALL) < read <= weight_bytes(SMALL) + SMALL.rows * 2 * 16 * token, "two pages of 16 a row"
    assert figures["busy_share"] is None, "no card was busy"


def test_it_counts_every_weight_but_the_embedding_and_the_norms(tmp_path: Path) -> None:
    build_model(SMALL, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read = {name: p.nbytes for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name}
    assert weight_bytes(SMALL) == sum(read.values())


def test_the_busy_share_counts_what_overlaps_once() -> None:
    assert share_covered([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (9.0, 10.0)]) == pytest.approx(0.6)
