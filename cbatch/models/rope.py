"""Fixes rotary embeddings that would change with the longest context of a batch. Called by load.

"dynamic" and "longrope" embeddings choose their frequencies by the longest position in the forward pass. In a batch of
strangers one long row would change what all others compute, and a row's cached keys would no longer fit its queries.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from cbatch.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

LONGROPE = "longrope"
FIXED = "default"  # the rope type whose frequencies transformers leaves alone


def fix_rotary_embeddings(model: nn.Module, max_model_len: int) -> None:
    """Choose long or short frequencies once, for contexts up to `max_model_len`; changes the modules in place.

    Raises UnsupportedModelError for a mixture by layer type that no known model has.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if not any(isinstance(name, str) and (name == LONGROPE or "dynamic" in name) for name in kinds):
            continue
        if isinstance(kind, dict):
            raise UnsupportedModelError("its rotary embeddings change with the batch, layer type by layer type")
        if kind == LONGROPE:
            _choose_longrope(module, max_model_len)
        module.rope_type = FIXED  # type: ignore[assignment]


def _choose_longrope(module: nn.Module, max_model_len: int) -> None:
    original = module.config.rope_parameters["original_max_position_embeddings"]  # type: ignore[union-attr, index]
    if max_model_len <= original:
        return
    frequencies = module.inv_freq
    assert isinstance(frequencies, torch.Tensor)
    with torch.no_grad():  # one position past the short range makes the module take its long frequencies
        module(frequencies.new_zeros(1), torch.tensor([[original]], device=frequencies.device))
    logger.info("long rotary frequencies are used for every row; --max-model-len %d would use the short ones", original)
