"""Rotary embeddings that depend on the longest row are fixed, so that a batch of strangers changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cbatch.models.rope import fix_rotary_embeddings
from tests.tiny_models import build_tiny_model

SHORT, LONG = 32, 128
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": SHORT,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


def build(family: str, rope: dict[str, Any]) -> PreTrainedModel:
    lengths = {"max_position_embeddings": LONG, "original_max_position_embeddings": SHORT}
    return build_tiny_model(family, rope_parameters=rope, **lengths)


def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.randint(5, 280, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids, use_cache=False).logits[0]


@pytest.mark.parametrize(("max_model_len", "length"), [(SHORT, SHORT), (LONG, LONG)])
def test_the_frequencies_are_those_of_the_longest_context(max_model_len: int, length: int) -> None:
    model = build("phi3", LONGROPE)
    expected = logits(model, length)
    fix_rotary_embeddings(model, max_model_len)
    assert torch.equal(logits(model, length), expected)


@pytest.mark.parametrize(("family", "rope"), [("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"])
def test_what_was_computed_before_changes_nothing(family: str, rope: dict[str, Any]) -> None:
    model = build(family, rope)
    fix_rotary_embeddings(model, LONG)
    before = logits(model, LONG)
    logits(model, 2 * LONG)
    assert torch.equal(logits(model, SHORT), before[:SHORT])
    assert torch.equal(logits(model, LONG), before)


def test_long_rows_change_short_ones_where_nothing_is_fixed() -> None:
    """Guards the tests above: the frequencies do depend on the longest position."""
    model = build("phi3", LONGROPE)
    alone = logits(model, SHORT)
    assert (logits(model, LONG)[:SHORT] - alone).abs().max() > 1e-2
