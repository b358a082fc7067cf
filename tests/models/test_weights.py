"""The bytes of the weights, told by headers alone, are those that a loaded model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cbatch.errors import UsageError
from cbatch.models.source import resolve_source
from cbatch.models.weights import weight_bytes
from tests.tiny_models import build_tiny, build_tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_all_parameters_in_the_runs_type(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path)
    parameters = sum(parameter.numel() for parameter in build_tiny_model(family).parameters())
    assert weight_bytes(resolve_source(str(folder)), dtype) == parameters * dtype.itemsize


def test_the_files_of_a_split_checkpoint_count_together_and_others_beside_them_do_not(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    (tmp_path / "other.safetensors").write_bytes(b"what is not in the index")
    expected = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert weight_bytes(resolve_source(str(tmp_path)), torch.float32) == expected


def test_packed_weights_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "packed": {"dtype": "I32", "shape": [10, 4], "data_offsets": [0, 160]},
            "bytes": {"dtype": "F8_E4M3", "shape": [7], "data_offsets": [160, 167]},
            "scale": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [167, 197]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert weight_bytes(resolve_source(str(tmp_path)), torch.float32) == 160 + 7 + 15 * 4


def test_without_headers_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert weight_bytes(resolve_source(str(tmp_path)), torch.float32) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"[1,2]"])
def test_a_damaged_file_is_a_usage_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged"):
        weight_bytes(resolve_source(str(tmp_path)), torch.float32)
