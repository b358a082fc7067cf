"""What a model is, read from its config alone: no weights are touched.

Called by the engine before anything is loaded, and by commands that never load. Refuses, by name, what cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from cbatch.config import EngineConfig
from cbatch.errors import UnsupportedModelError, UsageError
from cbatch.models.attention import FULL_ATTENTION, SLIDING_ATTENTION
from cbatch.models.hub import loading
from cbatch.models.source import ModelSource, resolve_source
from cbatch.models.support import check_supported

# Families whose windows are in their masks alone, and here there are none.
TELLS_NO_WINDOW = frozenset({"phimoe", "qwen2_moe"})
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers that decide memory and limits."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int  # tokens of prompt and completion together
    layer_types: tuple[str, ...]  # FULL_ATTENTION or SLIDING_ATTENTION, by layer
    sliding_windows: tuple[int | None, ...]  # tokens, by layer; None where every context fits
    checkpoint_dtype: str | None  # as torch names it; None where the config does not say
    has_experts: bool = False  # whether tokens choose which weights they meet
    shares_embedding: bool = False  # whether the head's weight is the embedding's


def inspect_model(config: EngineConfig) -> ModelShape:
    """Read the config of the model asked for. Raises UsageError, UnsupportedModelError."""
    source = resolve_source(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    model_config = load_config(source)
    check_supported(model_config, source)
    shape = describe_model(model_config, source, config.max_model_len)
    if shape.model_type in TELLS_NO_WINDOW and SLIDING_ATTENTION in shape.layer_types:
        window = min(window for window in shape.sliding_windows if window is not None)
        raise UnsupportedModelError(
            f"'{source.name}' ({shape.model_type}) does not tell its attention of its sliding windows",
            hint=f"--max-model-len {window} at most, which no window cuts",
        )
    return shape


def load_config(source: ModelSource) -> PretrainedConfig:
    """Read the model's config as transformers does. Raises UsageError."""
    with loading("the config", source):
        config: PretrainedConfig = AutoConfig.from_pretrained(source.path, **source.arguments())
        return config


def describe_model(model_config: PretrainedConfig, source: ModelSource, max_model_len: int | None = None) -> ModelShape:
    """Derive the shape from a supported model's config, for contexts up to `max_model_len`.

    Raises UsageError where the config states no context length.
    """
    text = model_config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    context_length = _context_length(text, source)
    # A window that no context outgrows is none.
    longest = min(max_model_len or context_length, context_length)
    windows = tuple(w if w is not None and w < longest else None for w in sliding_windows(text))
    dtype = getattr(text, "dtype", None) or getattr(model_config, "dtype", None)
    return ModelShape(
        model_type=model_config.model_type,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(text),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        vocab_size=text.vocab_size,
        context_length=context_length,
        layer_types=tuple(FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in windows),
        sliding_windows=windows,
        checkpoint_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        has_experts=any(getattr(text, name, None) for name in EXPERT_COUNTS),
        shares_embedding=bool(getattr(text, "tie_word_embeddings", False)),
    )


def sliding_windows(text: PretrainedConfig) -> tuple[int | None, ...]:
    """Give each layer's window. Without `layer_types` a window that is in use applies everywhere, as in Mistral."""
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        in_use = getattr(text, "use_sliding_window", True)
        return ((window if in_use else None),) * int(text.num_hidden_layers)
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in types)


def _num_kv_heads(text: PretrainedConfig) -> int:
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(value := getattr(text, name, None), int):
            return value
    return int(text.num_attention_heads)


def _intermediate_size(text: PretrainedConfig) -> int:
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if isinstance(value := getattr(text, name, None), int):
            return value
    return 4 * int(text.hidden_size)


def _context_length(text: PretrainedConfig, source: ModelSource) -> int:
    """Read the longest context; stretched rotary embeddings count where the config leaves them out."""
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        raise UsageError(f"the config of '{source.name}' states no context length (max_position_embeddings)")
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("yarn", "linear"):
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * rope.get("factor", 1.0)))
