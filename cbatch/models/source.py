"""Where a model lies: a folder, a .gguf file or a hub repository, and the arguments that transformers wants for it.

Called by inspect, load and tokenizer. Leaves out what is in there.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.errors import UsageError

CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"
GGUF_PACKAGES = ("gguf", "accelerate")
REPOSITORY = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
GGUF_HINT = 'pip install "cbatch[gguf]"'


@dataclass(frozen=True, slots=True)
class Role:
    """What is looked for, which option named it, and the files of which a folder of it has one."""

    noun: str
    option: str
    files: tuple[str, ...]


MODEL = Role("model", "--model", (CONFIG_FILE,))
TOKENIZER = Role(
    "tokenizer",
    "--tokenizer",
    ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", CONFIG_FILE),
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What `from_pretrained` is given; `path` is a folder or the name of a hub repository."""

    path: str
    gguf_file: str | None = None  # within `path`
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path | None:
        """The local folder; None where the hub is asked."""
        return Path(self.path) if Path(self.path).is_dir() else None

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(Path(self.path) / self.gguf_file) if self.gguf_file else self.path

    def arguments(self) -> dict[str, Any]:
        """Give the keyword arguments that every `from_pretrained` takes. False, not None: transformers never asks."""
        given: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "revision": self.revision}
        if self.gguf_file is not None:
            given["gguf_file"] = self.gguf_file
        return {name: value for name, value in given.items() if value is not None}


def resolve_source(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False, role: Role = MODEL
) -> ModelSource:
    """Find out what `model` names. Raises UsageError where it names nothing that could hold a model."""
    path = Path(model).expanduser()
    check = f"check the path given as {role.option}"
    if revision is not None and path.exists():
        raise UsageError(f"--revision is for hub repositories, and '{model}' is not one", hint="leave --revision out")
    if model and path.is_dir():  # the empty name would be the current folder
        return ModelSource(str(path), _only_gguf_file(path, role), None, trust_remote_code)
    if path.suffix == GGUF_SUFFIX:
        if not path.is_file():
            raise UsageError(f"there is no file '{model}'", hint=check)
        _check_gguf_packages()
        return ModelSource(str(path.parent), path.name, None, trust_remote_code)
    if path.is_file():
        raise UsageError(f"'{model}' is a file", hint=f"{role.option} takes a folder, a .gguf file or a hub name")
    if not REPOSITORY.fullmatch(model):
        raise UsageError(f"there is no {role.noun} folder '{model}'", hint=check)
    return ModelSource(model, None, revision, trust_remote_code)


def _only_gguf_file(folder: Path, role: Role) -> str | None:
    """Name the folder's .gguf file; None where it is an ordinary folder."""
    if any((folder / name).is_file() for name in role.files):
        return None
    names = sorted(path.name for path in folder.glob("*" + GGUF_SUFFIX))
    if len(names) > 1:
        raise UsageError(f"'{folder}' holds {len(names)} .gguf files", hint=f"name one of them, such as {names[0]}")
    if not names:
        raise UsageError(
            f"'{folder}' holds no {role.noun}: neither {role.files[0]} nor a .gguf file",
            hint=f"check the path given as {role.option}",
        )
    _check_gguf_packages()
    return names[0]


def _check_gguf_packages() -> None:
    missing = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"reading a .gguf file needs the package {' and '.join(missing)}", hint=GGUF_HINT)
