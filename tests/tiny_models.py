"""Tiny random models of every family that the engine must run, built from their config: no download, always the same.

Used by the tests of the models, the engine, the jobs and the command line: `build_tiny(family, folder)`. Each folder
holds weights in safetensors and a real tokenizer (bytes plus a few merges, BOS, EOS, a chat template). The model's
vocabulary is a little larger than the tokenizer's, as in many published models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 300
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CONTEXT = 512
WINDOW = 16

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_HYBRID = ["sliding_attention", "full_attention"] * 2
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
}

# family → (model type, what differs from the common settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": WINDOW}),
    "gpt2": ("gpt2", {"n_inner": 96, "num_key_value_heads": 4, "scale_attn_by_inverse_layer_idx": True}),
    "phi3": ("phi3", {"original_max_position_embeddings": CONTEXT}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.1, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, **_MOE}),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": _HYBRID,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 4,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": _HYBRID,
            "num_local_experts": 4,
            "rope_parameters": _YARN,
            **_MOE,
        },
    ),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": _HYBRID, "logit_scale": 1.0},
    ),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": _HYBRID}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 48, **_MOE}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}),
}

FULL_ATTENTION_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "phi3", "olmo2", "granite")


def build_tiny(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save the family's tiny model and tokenizer into `folder` and return it; `changes` go into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_model(family, seed=seed, **changes).save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


def build_tiny_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build the family's tiny model in float32 with weights that leave greedy choices clear and varied."""
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **own, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            _initialise(name, parameter, generator, tied=bool(config.tie_word_embeddings))
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model.eval()


def _initialise(name: str, parameter: torch.Tensor, generator: torch.Generator, *, tied: bool) -> None:
    """Draw one parameter: matrices wide, norms near neutral, embeddings smaller where a token would repeat itself."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim >= 2:
        is_embedding = "embed" in name or "wte" in name or "wpe" in name
        parameter.copy_(noise * ((0.1 if tied else 1.0) if is_embedding else 2.0 / parameter.shape[-1] ** 0.5))
    elif "sinks" in name:
        parameter.copy_(noise + 2.0)
    elif "norm" in name or "ln_" in name:
        parameter.add_(noise * 0.1)
    else:
        parameter.copy_(noise * 0.1)


def build_tiny_tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of 288 tokens that prepends BOS; `changes` go to transformers' wrapper."""
    specials = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("in", "g"), ("e", "r"), ("o", "n")]
    merges += [("a", "n"), ("an", "d"), ("Ġ", "and"), ("Ġ", "s"), ("r", "e"), ("Ġ", "w"), ("o", "r"), ("e", "n")]
    merges += [("Ġ", "Ġ"), ("1", "0"), ("Ġ", "T"), ("e", "s"), ("i", "s"), ("Ġ", "is"), ("l", "l"), ("Ġ", "o")]
    merges += [("Ġo", "f"), ("u", "s"), ("us", "er")]
    tokens = specials + alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings |= {"chat_template": CHAT_TEMPLATE, "model_max_length": CONTEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**settings, **changes})
