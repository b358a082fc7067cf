"""How many bytes a model's weights will take, read from the headers of its files; no weights are touched.

Called before they are loaded, and by commands that never load. Floating-point weights take the run's data type;
packed ones stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from cbatch.errors import UsageError
from cbatch.models.hub import loading
from cbatch.models.source import ModelSource

INDEX = "model.safetensors.index.json"
SAFETENSORS = "*.safetensors"
LENGTH_BYTES = 8  # of a safetensors header's length, before it
MAX_HEADER_BYTES = 100 << 20  # as safetensors itself has it
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # floating-point, by their safetensors names
OTHER_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # the rest has one

Tensor = tuple[str, int]  # safetensors data type, number of items


def weight_bytes(source: ModelSource, dtype: torch.dtype) -> int | None:
    """Count the bytes of the weights in `dtype`; None where no header says it. Raises UsageError."""
    with loading("the headers of the weights", source):
        if source.gguf_file is not None:
            return _count([("F32", count) for count in _gguf_tensors(Path(source.path) / source.gguf_file)], dtype)
        tensors = _hub_tensors(source) if source.folder is None else _folder_tensors(source.folder)
        return _count(tensors, dtype) if tensors else None


def read_header(path: Path) -> list[Tensor]:
    """Read the header of a safetensors file. Raises UsageError where it is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    try:
        table: dict[str, dict[str, Any]] = json.loads(header)
        return [(str(t["dtype"]), prod(t["shape"])) for name, t in table.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged: it has no safetensors header", hint="fetch the model again") from None


def _count(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    return sum(count * (dtype.itemsize if name in ITEM_BYTES else OTHER_BYTES.get(name, 1)) for name, count in tensors)


def _folder_tensors(folder: Path) -> list[Tensor]:
    """Read the headers of the files that hold the weights: those of the index, else all there are."""
    index = folder / INDEX
    files = sorted(folder.glob(SAFETENSORS))
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(names.values()))]
    return [tensor for file in files for tensor in read_header(file)]


def _gguf_tensors(path: Path) -> Iterator[int]:
    from gguf import GGUFReader

    for tensor in GGUFReader(path).tensors:
        yield int(tensor.n_elements)


def _hub_tensors(source: ModelSource) -> list[Tensor]:
    """Read the headers where the files lie on the hub: from the local cache, else by the hub's own interface."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, NotASafetensorsRepoError

    patterns = [SAFETENSORS, INDEX]
    try:
        folder = snapshot_download(
            source.path, revision=source.revision, local_files_only=True, allow_patterns=patterns
        )
        if tensors := _folder_tensors(Path(folder)):
            return tensors
    except LocalEntryNotFoundError:
        pass
    try:
        metadata = HfApi().get_safetensors_metadata(source.path, revision=source.revision)
    except NotASafetensorsRepoError:
        return []
    files = metadata.files_metadata.values()
    return [(tensor.dtype, prod(tensor.shape)) for file in files for tensor in file.tensors.values()]
