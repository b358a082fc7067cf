"""A model's identity: what must not change between two runs that share a journal. Called by inspect.

Weights are sampled, not read whole: a checkpoint is gigabytes, and any training changes nearly all of it. Times and
paths are left out, so that a copy on another machine is the same model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import PretrainedConfig

from cbatch.models.source import ModelSource

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")
GENERATION_CONFIG = "generation_config.json"
SAMPLE_BYTES = 4096
NUM_SAMPLES = 256  # over all weight files
DIGEST_BYTES = 16


def model_identity(config: PretrainedConfig, source: ModelSource, tokenizer: ModelSource | None = None) -> str:
    """Hash a model's config, weights and tokenizer to 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(digest, "config", json.dumps(_stable_config(config), sort_keys=True, default=str).encode())
    _add_files(digest, source, commit=getattr(config, "_commit_hash", None), weights=True)
    if tokenizer is not None:
        _add_files(digest, tokenizer, commit=None, weights=False)
    return digest.hexdigest()


def _stable_config(config: PretrainedConfig) -> dict[str, object]:
    """Give the config without what depends on where it was read and by which version."""
    unstable = {"_name_or_path", "transformers_version", "_commit_hash"}
    return {name: value for name, value in config.to_dict().items() if name not in unstable}


def _add_files(digest: hashlib.blake2b, source: ModelSource, *, commit: str | None, weights: bool) -> None:
    folder = source.folder
    if folder is None:
        _add(digest, source.path, f"{source.revision}@{commit}".encode())
        return
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        if path.name == GENERATION_CONFIG or path.name.startswith(TOKENIZER_FILES):
            _add(digest, path.name, path.read_bytes())
    if weights:
        chosen = [path for path in files if _holds_weights(path, source.gguf_file)]
        for path in chosen:
            _add(digest, path.name, _sample(path, max(2, NUM_SAMPLES // len(chosen))))


def _holds_weights(path: Path, gguf_file: str | None) -> bool:
    return path.name == gguf_file if gguf_file else path.suffix in WEIGHT_SUFFIXES


def _sample(path: Path, num_samples: int) -> bytes:
    """Hash a file's size and evenly spaced pieces of it, the first and the last included."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=DIGEST_BYTES)
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb") as file:
        for i in range(num_samples):
            file.seek(last * i // (num_samples - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _add(digest: hashlib.blake2b, name: str, content: bytes) -> None:
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
