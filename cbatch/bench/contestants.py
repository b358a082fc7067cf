"""Who takes part: the engine's modes and the peers, each as a command that runs it in a process of its own.

A peer lives in an interpreter of its own, or in this one. Leaves out what the processes do (`worker`, `peer_driver`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cbatch.engine.modes import parse_modes
from cbatch.errors import UsageError
from cbatch.jobs.spinning import spinning_environment

DRIVER = Path(__file__).with_name("peer_driver.py")
WORKER = "cbatch.bench.worker"
PROBE_TIMEOUT_S = 60
# What a peer runs best with on few cores, unless the environment says otherwise: vLLM in one process, and on a CPU not
# the whole memory as its cache, in GiB.
PEER_ENVIRONMENT = {"vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "6"}}


@dataclass(frozen=True, slots=True)
class Peer:
    """A public engine: the packages that it needs, and how they are installed."""

    packages: tuple[str, ...]
    install: str


PEERS = {
    "transformers": Peer(("torch", "transformers"), "pip install transformers torch"),
    "transformers-cb": Peer(("torch", "transformers"), "pip install transformers torch"),
    "vllm": Peer(("vllm",), "pip install vllm"),
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run the rows."""

    name: str
    command: tuple[str, ...]
    arguments: dict[str, object]  # goes into its task
    environment: Mapping[str, str] = field(default_factory=dict)  # where not set already
    missing: str | None = None  # why it cannot run here

    @property
    def is_peer(self) -> bool:
        return self.name in PEERS


def choose_modes(text: str) -> list[Contestant]:
    """Find the modes asked for. Raises UsageError."""
    command = (sys.executable, "-m", WORKER)
    return [Contestant(name, command, {"mode": name}, spinning_environment()) for name in parse_modes(text)]


def read_peers(text: str | None) -> list[Contestant]:
    """Read the peers asked for and look whether they are installed. Raises UsageError."""
    peers = []
    for item in _split(text) if text is not None else []:
        name, _, interpreter = item.partition("=")
        if name not in PEERS:
            raise UsageError(f"--against names '{name}', which is no peer", hint=f"known: {', '.join(PEERS)}")
        peers.append(_find_peer(name, interpreter))
    if len({peer.name for peer in peers}) < len(peers):
        raise UsageError("--against names a peer twice")
    return peers


def _find_peer(name: str, interpreter: str) -> Contestant:
    found = shutil.which(Path(interpreter).expanduser()) if interpreter else sys.executable
    if found is None:
        raise UsageError(
            f"--against {name}={interpreter}: there is no program of that name",
            hint="give the path of the Python that has it, such as venv/bin/python",
        )
    peer = PEERS[name]
    absent = _absent_packages(found, peer.packages)
    missing = None
    if absent:
        where = interpreter or "this Python"
        hint = peer.install if interpreter else f"{peer.install}, or --against {name}=/path/to/its/python"
        missing = f"{' and '.join(absent)} is not installed in {where} ({hint})"
    return Contestant(name, (found, str(DRIVER)), {"peer": name}, PEER_ENVIRONMENT.get(name, {}), missing)


def _absent_packages(interpreter: str, packages: tuple[str, ...]) -> list[str]:
    """Ask an interpreter which of `packages` it lacks, importing none of them. Raises UsageError."""
    code = (
        "import importlib.util as u, json, sys; print(json.dumps([p for p in sys.argv[1:] if u.find_spec(p) is None]))"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code, *packages], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
        absent: list[str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(f"{interpreter} is no Python that runs here: {type(error).__name__}") from error
    return absent


def _split(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"--against has an empty name: it is '{text}'", hint="separate names by commas")
    return list(dict.fromkeys(names))
