"""Sampling defaults and end tokens out of a model's own generation config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from cbatch.models.generation import end_token_ids, generation_defaults


@pytest.mark.parametrize(
    ("stated", "sampling", "not_taken"),
    [
        ({}, {}, ()),
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "bos_token_id": 1, "use_cache": True}, {}, ()),
        ({"do_sample": True}, {"temperature": 1.0}, ()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
            (),
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, ()),
        ({"temperature": 0.6, "top_p": 0.9}, {}, ()),
        ({"do_sample": True, "typical_p": 1.0, "num_beams": 1}, {"temperature": 1.0}, ()),
        ({"repetition_penalty": 1.1, "num_beams": 4}, {"repetition_penalty": 1.1}, ("num_beams",)),
        ({"repetition_penalty": -1.0}, {}, ("repetition_penalty",)),
        (
            {"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 99},
            {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.05},
            ("max_new_tokens",),
        ),
        ({"min_p": 0.1}, {}, ()),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}, ("top_k",)),
    ],
)
def test_what_the_file_states_is_taken_or_named(
    stated: dict[str, Any], sampling: dict[str, object], not_taken: tuple[str, ...]
) -> None:
    defaults = generation_defaults(GenerationConfig(**stated))
    assert defaults.sampling == sampling
    assert defaults.not_taken == not_taken


def test_without_a_generation_config_there_are_no_defaults() -> None:
    assert generation_defaults(None).sampling == {}


def test_end_tokens_of_all_sources_are_joined() -> None:
    sources = [SimpleNamespace(eos_token_id=value) for value in (5, [5, 7], None, (9,), [])]
    assert end_token_ids(*sources, SimpleNamespace()) == {5, 7, 9}
    assert end_token_ids(SimpleNamespace(eos_token_id=None)) == frozenset()
