"""Drafts that tests know to be right, or wrong: what a run without any would say, with other tokens in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cbatch.engine.speculation import MAX_DRAFTS, PromptLookup


def know(monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]]) -> None:
    """Draft from `texts`, prompts with their completions, and now and then a token that only chance would choose."""
    known = [list(text) for text in texts]

    def propose(_: PromptLookup, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        rng = random.Random(len(token_ids))
        beginning = list(token_ids)
        text = next((text for text in known if text[: len(beginning)] == beginning), [])
        drafts = text[len(beginning) : len(beginning) + min(most, MAX_DRAFTS)]
        wrong = rng.choice([0, 0, 1, 3, None, None, None])
        return tuple(5 + (token + 1) % 200 if i == wrong else token for i, token in enumerate(drafts))

    monkeypatch.setattr(PromptLookup, "propose", propose)
