"""Loads a model for the engine: weights, tokenizer, and what the model says of its own sampling.

Called by the engine once, after inspect. Leaves out the KV cache and everything that depends on the batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from cbatch_kernels import dispatch
from cbatch_kernels.tuned_choices import ModelSizes
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from cbatch.config import EngineConfig
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.models.attention import ATTENTION_NAME, register_attention
from cbatch.models.fused_decoder import FusedDecoder
from cbatch.models.generation import end_token_ids
from cbatch.models.hub import loading
from cbatch.models.inspect import ModelShape
from cbatch.models.machine import Choice
from cbatch.models.memory import free_memory, trim_heap
from cbatch.models.outline import ModelOutline, outline_model
from cbatch.models.patch import PatchDiffersError, head_copy_bytes, patch_model, patch_refusal
from cbatch.models.rope import fix_rotary_embeddings
from cbatch.models.source import ModelSource, resolve_source
from cbatch.models.tokenizer import Tokenizer
from cbatch.models.weights import weight_bytes
from cbatch.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelOutline):
    """A model in memory, ready for the engine's forward passes."""

    model: PreTrainedModel


def load_model(config: EngineConfig, shape: ModelShape) -> LoadedModel:
    """Load weights and tokenizer of the model that `shape` describes; sets torch's number of CPU threads.

    Raises UsageError.
    """
    source = resolve_source(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    outline = outline_model(config, shape)
    torch.set_num_threads(outline.num_threads)
    _check_room(source, outline)
    logger.info("loading %s in %s on %s", source.name, outline.dtype, outline.device)
    max_model_len = config.max_model_len or shape.context_length
    load = partial(_load_on_device, source, outline.dtype, outline.device, max_model_len)
    model = load()
    if source.gguf_file is not None and config.tokenizer is None:
        _check_gguf_tokenizer(model, outline.tokenizer, source)
    patched = _patch(model, shape, outline.dtype, outline.device)
    if patched.value is None:
        del model  # before it is in memory twice
        model = load()
    trim_heap()
    sizes = ModelSizes(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size, shape.intermediate_size)
    dispatch.tune(outline.device, outline.dtype, sizes)
    known = {field.name: getattr(outline, field.name) for field in fields(outline)}
    known |= {"patched": bool(patched.value), "patched_reason": patched.reason}
    known["in_one_call"] = any(isinstance(module, FusedDecoder) for module in model.modules())
    return LoadedModel(model=model, **known)


def _check_room(source: ModelSource, outline: ModelOutline) -> None:
    """Refuse weights that memory does not hold: a kernel that is out of it ends a process without a word.

    Raises DoesNotFitError.
    """
    weights, free = weight_bytes(source, outline.dtype), free_memory(outline.device)
    if weights is None:
        return
    needed = weights + head_copy_bytes(outline.shape, outline.dtype, outline.device)
    if needed <= free.num_bytes:
        return
    narrower = "a smaller --dtype, or " if outline.dtype.itemsize > torch.bfloat16.itemsize else ""
    raise DoesNotFitError(
        f"the weights of '{source.name}' do not fit: they take {format_bytes(needed)} in "
        f"{str(outline.dtype).removeprefix('torch.')}, of {format_bytes(free.num_bytes)} ({free.source})",
        hint=f"try {narrower}a smaller model",
    )


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


def _check_gguf_tokenizer(model: PreTrainedModel, tokenizer: Tokenizer, source: ModelSource) -> None:
    """Warn where transformers did not read BOS and EOS of a .gguf file's tokenizer, as 5.17 does not."""
    if tokenizer.eos_token_id not in end_token_ids(model.config):
        logger.warning(
            "the tokenizer read from %s has another EOS than its model, and may lack BOS: upgrade transformers, or "
            "give the original one with --tokenizer",
            source.name,
        )


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
