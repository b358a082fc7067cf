"""What `transformers` itself generates, greedily and in float32: the measure of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEAR_TIE = 1e-4  # logits closer than this are the same to float32 arithmetic in another order


@dataclass(frozen=True)
class Reference:
    """One prompt's greedy tokens, and by how much each beat the second best."""

    token_ids: list[int]
    margins: list[float]


def generate_references(
    model_folder: Path, prompts: Sequence[list[int]], max_tokens: Sequence[int], **parameters: Any
) -> list[Reference]:
    """Generate each prompt by itself, EOS ignored, exactly `max_tokens` tokens, none that the tokenizer lacks.

    `parameters` go to `generate`.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").eval()
    beyond = list(range(len(AutoTokenizer.from_pretrained(model_folder)), model.config.vocab_size))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    references = []
    for prompt, length in zip(prompts, max_tokens, strict=True):
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=length,
            suppress_tokens=beyond or None,
            output_scores=True,
            return_dict_in_generate=True,
            **parameters,
        )
        best = [scores[0].topk(2).values for scores in output.scores]
        references.append(Reference(output.sequences[0, len(prompt) :].tolist(), [float(b[0] - b[1]) for b in best]))
    return references


def count_near_ties(references: Sequence[Reference], generated: Sequence[list[int]]) -> int:
    """Compare token for token; return how many rows left the reference at a near tie, fail on any other difference."""
    ties = 0
    for row, (reference, tokens) in enumerate(zip(references, generated, strict=True)):
        assert len(tokens) == len(reference.token_ids), f"row {row}: {len(tokens)} tokens"
        differing = [i for i, (a, b) in enumerate(zip(reference.token_ids, tokens, strict=True)) if a != b]
        if differing:
            at = differing[0]
            assert reference.margins[at] < NEAR_TIE, (
                f"row {row} differs at token {at}: {tokens[at]} instead of {reference.token_ids[at]}, "
                f"margin {reference.margins[at]:.2e}"
            )
            ties += 1
    return ties
