"""GGUF files: a tiny Llama written as llama.cpp's converter writes it gives the same logits and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from cbatch.config import EngineConfig
from cbatch.models.generation import end_token_ids, generation_defaults
from cbatch.models.inspect import inspect_model
from cbatch.models.load import load_model
from cbatch.models.outline import outline_model
from cbatch.models.source import resolve_source
from cbatch.models.weights import weight_bytes

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TEXT = "the sand is 10 and 日本 !"


@pytest.fixture(scope="module")
def gguf_file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, tiny_llama, config.vocab_size)
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        values = tensor.float().numpy()
        for projection, num_heads in heads.items():
            if projection in name:
                values = interleave(values, num_heads)
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def interleave(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Order the rows of a query or key projection as GGUF wants them for its rotary embedding."""
    head_dim = weight.shape[0] // num_heads
    return np.ascontiguousarray(weight.reshape(num_heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape))


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {entry["content"] for entry in content["added_tokens"]}
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    tokens += [f"[UNUSED{i}]" for i in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_add_bos_token(True)


def test_a_gguf_model_computes_what_its_original_does(
    gguf_file: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.models.load.patch_refusal", lambda *_: "the original is run without a cache")
    config = EngineConfig(model=str(gguf_file), dtype="float32", device="cpu")
    loaded = load_model(config, inspect_model(config))
    original = AutoModelForCausalLM.from_pretrained(tiny_llama)
    loaded.model.set_attn_implementation("eager")
    ids = torch.randint(5, 280, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, atol=1e-4, rtol=0)
    assert original.config.eos_token_id in loaded.eos_token_ids


def test_a_gguf_tokenizer_encodes_as_its_original_does_or_a_warning_says_so(
    gguf_file: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = EngineConfig(model=str(gguf_file.parent))
    tokenizer = load_model(folder, inspect_model(folder)).tokenizer
    original = EngineConfig(model=str(tiny_llama))
    expected = load_model(original, inspect_model(original)).tokenizer
    is_same = tokenizer.encode(TEXT) == expected.encode(TEXT) and tokenizer.eos_token_id == expected.eos_token_id
    assert is_same != ("--tokenizer" in caplog.text)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_what_is_known_without_its_weights_is_what_a_loaded_one_says(gguf_file: Path, tiny_llama: Path) -> None:
    config = EngineConfig(model=str(gguf_file), dtype="float32")
    shape = inspect_model(config)
    outline, model = outline_model(config, shape), load_model(config, shape).model
    assert outline.eos_token_ids == end_token_ids(model.generation_config, model.config)
    assert outline.generation_defaults == generation_defaults(model.generation_config).sampling
    original = AutoModelForCausalLM.from_pretrained(tiny_llama)
    num_parameters = sum(parameter.numel() for parameter in original.parameters())
    assert weight_bytes(resolve_source(config.model), torch.float32) == num_parameters * 4
