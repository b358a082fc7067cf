"""What is known of a model without its weights: what load finds beside them, and commands that never load work with.

Leaves out the model itself, whose outline a loaded one carries.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.models.generation import end_token_ids, generation_defaults
from cbatch.models.hub import loading
from cbatch.models.inspect import ModelShape, load_config
from cbatch.models.machine import choose_device, choose_dtype, choose_num_threads
from cbatch.models.patch import patch_refusal, takes_one_call
from cbatch.models.source import TOKENIZER, ModelSource, resolve_source
from cbatch.models.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

GGUF_STORED_DTYPE = "bfloat16"  # what quantised blocks are unpacked to where the device computes in it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """Everything about a model that is to run here, but its weights."""

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
    in_one_call: bool  # whether that is all layers at once, which takes less memory
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, object]  # sampling parameters under our names; empty where the model has none
    generation_not_taken: tuple[str, ...]  # settings of its generation config that have no counterpart here

    @property
    def num_choosable(self) -> int:
        """Tokens that may be generated: a model's head can have rows beyond them, which no token stands for."""
        return max(self.tokenizer.num_tokens, max(self.eos_token_ids, default=-1) + 1)


def outline_model(config: EngineConfig, shape: ModelShape) -> ModelOutline:
    """Find out all but the weights of the model that `shape` describes. Raises UsageError."""
    source = resolve_source(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, GGUF_STORED_DTYPE if source.gguf_file else shape.checkpoint_dtype, device.value)
    threads = choose_num_threads()
    tokenizer = load_tokenizer(tokenizer_source(config, source), shape.vocab_size)
    model_config = load_config(source)
    generation_config = _read_generation_config(source, model_config)
    defaults = generation_defaults(generation_config)
    if defaults.not_taken:
        logger.warning("not taken from the model's generation config: %s", ", ".join(defaults.not_taken))
    refusal = patch_refusal(shape.model_type, dtype.value, device.value)
    text_config = model_config.get_text_config(decoder=True)
    return ModelOutline(
        shape=shape,
        tokenizer=tokenizer,
        device=device.value,
        device_reason=device.reason,
        dtype=dtype.value,
        dtype_reason=dtype.reason,
        num_threads=threads.value,
        num_threads_reason=threads.reason,
        patched=refusal is None,
        patched_reason=refusal or f"{shape.model_type} is in the table of patches",
        in_one_call=refusal is None and takes_one_call(shape.model_type, dtype.value, device.value),
        eos_token_ids=end_token_ids(generation_config, model_config, text_config, tokenizer),
        generation_defaults=defaults.sampling,
        generation_not_taken=defaults.not_taken,
    )


def tokenizer_source(config: EngineConfig, source: ModelSource) -> ModelSource:
    """Tell where the tokenizer lies, the model lying at `source`. Raises UsageError."""
    if config.tokenizer is None:
        return source
    return resolve_source(config.tokenizer, trust_remote_code=config.trust_remote_code, role=TOKENIZER)


def _read_generation_config(source: ModelSource, model_config: PretrainedConfig) -> GenerationConfig:
    """Read it as transformers does for a model: from its own file, else from the config. Raises UsageError."""
    with loading("the generation config", source):
        try:
            return GenerationConfig.from_pretrained(source.path, revision=source.revision or "main")
        except OSError as error:
            file = Path(source.path) / GENERATION_CONFIG_NAME
            if source.gguf_file is None and file.exists():  # transformers would go on as if it were not there
                raise UsageError(f"{file} is not JSON that can be read", hint="mend it, or remove it") from error
            return GenerationConfig.from_model_config(model_config)
