"""What a job's process imports of torch and transformers: the compiler waits for a user, and then is whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAN = """
import sys
from cbatch.models.lean_import import import_modeling
import_modeling()
import transformers.models.llama.modeling_llama
assert "torch._dynamo.symbolic_convert" not in sys.modules, "the compiler was imported"
assert "torch.distributed.tensor" not in sys.modules, "distributed tensors were imported"
"""
COMPILE = """
import torch
assert torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(1)).item() == 3
assert "torch._dynamo.symbolic_convert" in sys.modules
"""
USES = {
    "nobody": "",
    "torch.compile": COMPILE,
    "a setting": "import torch._dynamo.config\ntorch._dynamo.config.verbose = True" + COMPILE,
    "a function": "from torch._dynamo.utils import counters\ncounters.clear()" + COMPILE,
    "the package": "from torch import _dynamo\n_dynamo.reset()" + COMPILE,
    "a second import": "import_modeling()" + COMPILE,
    "a mask that needs one of its parts": """
from transformers import LlamaConfig, LlamaForCausalLM
import torch
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="flex_attention")
""",
}


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", USES)
def test_the_compiler_is_imported_when_somebody_uses_it(use: str) -> None:
    python(LEAN + USES[use])


def test_what_is_imported_already_stays() -> None:
    python("""
import sys, torch._dynamo, transformers.modeling_utils
from cbatch.models.lean_import import import_modeling
whole = sys.modules["torch._dynamo"]
import_modeling()
assert sys.modules["torch._dynamo"] is whole and "torch._dynamo.symbolic_convert" in sys.modules
""")


def test_a_torch_that_is_built_otherwise_is_imported_whole() -> None:
    python(
        """
import sys
from cbatch.models import lean_import
lean_import.FREE_STANDING = "torch._dynamo.gone"
lean_import.import_modeling()
assert "torch._dynamo.symbolic_convert" in sys.modules
"""
        + COMPILE
    )


def test_a_model_that_is_not_there_is_refused_before_torch_is_imported() -> None:
    python("""
import sys
from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.engine.load import load_engine
try:
    load_engine(EngineConfig(model="./gone"))
except UsageError as error:
    assert "no model folder" in str(error)
else:
    raise AssertionError("not refused")
assert "torch" not in sys.modules
""")
