"""The model's identity: a hash by which a finished row is known to be of this model. Called once at the start of a job.

Small files (configuration, tokenizer, chat template) count whole, weights by size and samples spread over each file, so
that a checkpoint of many gigabytes is told from its neighbour in milliseconds. Where the folder lies does not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from cbatch.config import EngineConfig
from cbatch.errors import UsageError

WHOLE_FILE_BYTES = 64 << 20
NUM_SAMPLES = 32
SAMPLE_BYTES = 64 << 10
MODEL_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".gguf", ".tiktoken", ".py"})
HUB_TIMEOUT_S = 10


def identify_model(config: EngineConfig) -> bytes:
    """Hash what decides over the model's answers: its files or its hub commit, its tokenizer, its arithmetic.

    Raises UsageError where its files cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, revision in ((config.model, config.revision), (config.tokenizer, None)):
        digest.update(_identify(name, revision) if name is not None else b"none")
    digest.update(config.dtype.encode())
    if config.deterministic:
        digest.update(b"deterministic")
    return digest.digest()


def _identify(name: str, revision: str | None) -> bytes:
    path = Path(name).expanduser()
    try:
        if path.is_dir() or path.is_file():
            return _identify_files(path)
    except OSError as error:
        raise UsageError(f"cannot read the model {error.filename}: {error.strerror}") from error
    return f"hub {name}@{_hub_commit(name, revision)}".encode()


def _identify_files(path: Path) -> bytes:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else file.suffix}\0{size}\0".encode())
        for piece in _pieces(file, size):
            digest.update(piece)
    return digest.digest()


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    """The content of a small file, samples of a large one: its start, its end, and evenly between."""
    with file.open("rb") as stream:
        if size <= WHOLE_FILE_BYTES:
            while chunk := stream.read(1 << 20):
                yield chunk
            return
        for number in range(NUM_SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)


def _hub_commit(name: str, revision: str | None) -> str:
    """The commit that a branch of a hub repository names now; offline the one in the cache, else the branch itself."""
    from huggingface_hub import HfApi, constants

    revision = revision or "main"
    try:
        commit = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S).sha
    except Exception:  # no network, no such repository, no access: loading the model says which
        folder = "models--" + name.replace("/", "--")
        cached = Path(constants.HF_HUB_CACHE) / folder / "refs" / revision
        commit = cached.read_text().strip() if cached.is_file() else None
    return commit or revision
