"""Which models cannot run, each with the reason by name. Called by inspect before any weights load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import getsource
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from cbatch.errors import UnsupportedModelError
from cbatch.models.source import ModelSource

PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ALIBI_MODELS = frozenset({"bloom", "mpt"})
# Multimodal models whose text half was tried on text alone; all others are refused.
TEXT_OF_MULTIMODAL = frozenset({"gemma3"})
# Families of transformers that attend in a way of their own; each was seen to give other tokens, or none.
OWN_ATTENTION = {
    "diffllama": "attends twice in every layer, to two halves of its values",
    "doge": "builds its own attention mask",
    "hrm_text": "runs its layers several times for one token",
    "jetmoe": "attends to more keys and values than it caches",
    "llama4_text": "scales its queries by positions that it counts in a cache of its own",
    "mimo_v2_flash": "has layers whose keys and values differ in number and size",
    "nemotron": "does not hand on to its layers what they are to attend to",
}
PER_LAYER = frozenset({"head_dim", "num_attention_heads", "num_key_value_heads"})
HINT = "choose a decoder-only text model with ordinary attention layers"


def check_supported(config: PretrainedConfig, source: ModelSource) -> None:
    """Raise UnsupportedModelError, naming the reason, for a model that paged attention cannot serve."""
    if (reason := refusal(config)) is not None:
        raise UnsupportedModelError(f"'{source.name}' ({config.model_type}) {reason}", hint=HINT)


def refusal(config: PretrainedConfig) -> str | None:
    """Say why a config's model cannot run; None where it can."""
    text = config.get_text_config(decoder=True)
    for check in _CHECKS:
        if (reason := check(config, text)) is not None:
            return reason
    return None


def _kind(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model"
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "is an encoder: it does not generate text"
    has_own_code = bool(getattr(config, "auto_map", None))
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not has_own_code:
        return "does not generate text from text alone"
    if text is not config and config.model_type not in TEXT_OF_MULTIMODAL:
        return "is a multimodal model"
    return None


def _attention(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    if config.model_type in ALIBI_MODELS or getattr(text, "alibi", False):
        return "adds position biases to its attention scores (alibi)"
    if getattr(text, "kv_lora_rank", None):
        return "has multi-head latent attention"
    if getattr(text, "num_kv_shared_layers", None):
        return "shares keys and values between layers"
    if getattr(text, "use_bidirectional_attention", None):
        return "attends in both directions"
    if PER_LAYER & set(getattr(text, "per_layer_attributes", None) or ()):
        return "has layers whose heads differ in number or size"
    return None


def _layers(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if others := sorted(set(types) - PAGED_LAYER_TYPES):
        return f"has {' and '.join(others).replace('_', ' ')} layers"
    if "sliding_attention" in types and not getattr(text, "sliding_window", None):
        return "has sliding-window layers, and its config states no sliding_window"
    if types and len(types) != text.num_hidden_layers:
        return f"lists {len(types)} layer types for {text.num_hidden_layers} layers"
    return None


def _implementation(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Look at the class that would be built; a model with code of its own shows what it is when it runs."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if getattr(model_class, "_is_stateful", False):
        return "keeps a recurrent state instead of keys and values"
    uses_interface = "ALL_ATTENTION_FUNCTIONS" in getsource(sys.modules[model_class.__module__])
    if not uses_interface or not getattr(model_class, "_supports_attention_backend", False):
        return "does not use transformers' attention interface"
    return OWN_ATTENTION.get(text.model_type)


_CHECKS: tuple[Callable[[PretrainedConfig, PretrainedConfig], str | None], ...] = (
    _kind,
    _attention,
    _layers,
    _implementation,
)
