"""Loads a model for the engine: weights, tokenizer, and what the model says of its own sampling.

Called by the engine once, after inspect. Leaves out the KV cache and everything that depends on the batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.models.attention import ATTENTION_NAME, register_attention
from cbatch.models.generation import end_token_ids, generation_defaults
from cbatch.models.hub import loading
from cbatch.models.inspect import ModelShape
from cbatch.models.machine import Choice, choose_device, choose_dtype, choose_num_threads
from cbatch.models.patch import PatchDiffersError, patch_model, patch_refusal
from cbatch.models.rope import fix_rotary_embeddings
from cbatch.models.source import ModelSource, resolve_source
from cbatch.models.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

GGUF_STORED_DTYPE = "bfloat16"  # what quantised blocks are unpacked to where the device computes in it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, ready for the engine's forward passes."""

    model: PreTrainedModel
    shape: ModelShape
    tokenizer: Tokenizer
    device: torch.device
    device_reason: str
    dtype: torch.dtype
    dtype_reason: str
    num_threads: int
    num_threads_reason: str
    patched: bool  # whether fused modules stand in for transformers' own
    patched_reason: str
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, object]  # sampling parameters under our names; empty where the model has none
    generation_not_taken: tuple[str, ...]  # settings of its generation config that have no counterpart here

    @property
    def num_choosable(self) -> int:
        """Tokens that may be generated: a model's head can have rows beyond them, which no token stands for."""
        return max(self.tokenizer.num_tokens, max(self.eos_token_ids, default=-1) + 1)


def load_model(config: EngineConfig, shape: ModelShape) -> LoadedModel:
    """Load weights and tokenizer of the model that `shape` describes; sets torch's number of CPU threads.

    Raises UsageError.
    """
    source = resolve_source(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, GGUF_STORED_DTYPE if source.gguf_file else shape.checkpoint_dtype, device.value)
    threads = choose_num_threads()
    torch.set_num_threads(threads.value)
    tokenizer = load_tokenizer(_tokenizer_source(config, source), shape.vocab_size)
    logger.info("loading %s in %s on %s", source.name, dtype.value, device.value)
    max_model_len = config.max_model_len or shape.context_length
    load = partial(_load_on_device, source, dtype.value, device.value, max_model_len)
    model = load()
    if source.gguf_file is not None and config.tokenizer is None:
        _check_gguf_tokenizer(model, tokenizer, source)
    patched = _patch(model, shape, dtype.value, device.value)
    if patched.value is None:
        del model  # before it is in memory twice
        model = load()
    return _describe(model, shape, tokenizer, device, dtype, threads, Choice(bool(patched.value), patched.reason))


def _load_on_device(
    source: ModelSource, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> PreTrainedModel:
    model = _load_weights(source, dtype)
    fix_rotary_embeddings(model, max_model_len)
    with loading("the weights", source):
        nn.Module.to(model, device)
    return model


def _patch(model: PreTrainedModel, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Choice[bool | None]:
    """Patch the model in place where that is possible; None where it went wrong and the model is of no more use."""
    if (refusal := patch_refusal(shape.model_type, dtype, device)) is not None:
        return Choice(False, refusal)
    try:
        patch_model(model, shape, device)
    except PatchDiffersError as error:
        logger.warning("%s; it runs unpatched", error)
        return Choice(None, str(error))
    return Choice(True, f"the patched {shape.model_type} gave the logits of the model as it was loaded")


def _describe(
    model: PreTrainedModel,
    shape: ModelShape,
    tokenizer: Tokenizer,
    device: Choice[torch.device],
    dtype: Choice[torch.dtype],
    threads: Choice[int],
    patched: Choice[bool],
) -> LoadedModel:
    defaults = generation_defaults(model.generation_config)
    if defaults.not_taken:
        logger.warning("not taken from the model's generation config: %s", ", ".join(defaults.not_taken))
    text_config = model.config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        shape=shape,
        tokenizer=tokenizer,
        device=device.value,
        device_reason=device.reason,
        dtype=dtype.value,
        dtype_reason=dtype.reason,
        num_threads=threads.value,
        num_threads_reason=threads.reason,
        patched=patched.value,
        patched_reason=patched.reason,
        eos_token_ids=end_token_ids(model.generation_config, model.config, text_config, tokenizer),
        generation_defaults=defaults.sampling,
        generation_not_taken=defaults.not_taken,
    )


def _check_gguf_tokenizer(model: PreTrainedModel, tokenizer: Tokenizer, source: ModelSource) -> None:
    """Warn where transformers did not read BOS and EOS of a .gguf file's tokenizer, as 5.17 does not."""
    if tokenizer.eos_token_id not in end_token_ids(model.config):
        logger.warning(
            "the tokenizer read from %s has another EOS than its model, and may lack BOS: upgrade transformers, or "
            "give the original one with --tokenizer",
            source.name,
        )


def _tokenizer_source(config: EngineConfig, source: ModelSource) -> ModelSource:
    if config.tokenizer is None:
        return source
    return resolve_source(config.tokenizer, trust_remote_code=config.trust_remote_code)


def _load_weights(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """Load the weights on the CPU, in evaluation mode, with our attention. Raises UsageError where some are missing."""
    register_attention()
    arguments: dict[str, Any] = {**source.arguments(), "attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if source.gguf_file is not None:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    auto_model: Any = AutoModelForCausalLM
    with loading("the weights", source):
        model, info = auto_model.from_pretrained(source.path, output_loading_info=True, **arguments)
    if missing := sorted(info["missing_keys"]):
        raise UsageError(
            f"the checkpoint '{source.name}' lacks {len(missing)} weights that the model needs, such as {missing[0]}",
            hint="the file is damaged, or not a text-generation model",
        )
    assert isinstance(model, PreTrainedModel)
    nn.Module.eval(model).requires_grad_(False)
    return model
