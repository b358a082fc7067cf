"""What the tests of the command line share: the real program in a process, the stub engine in the model's place."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli import app

ROOT = Path(__file__).parent.parent.parent
STUB = [sys.executable, str(ROOT / "tests" / "stub_engine.py")]
TIMEOUT_S = 120


def run_stub(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `cbatch ARGUMENTS` in `cwd`."""
    options = {"capture_output": True, "stdin": subprocess.DEVNULL} | options
    return subprocess.run([*STUB, *arguments], cwd=cwd, text=True, timeout=TIMEOUT_S, **options)


def run_job(cwd: Path, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a job over in.jsonl to out.jsonl."""
    return run_stub("run", "in.jsonl", "--model", "model", "-o", "out.jsonl", *more, cwd=cwd, **options)


def unprivileged() -> list[str]:
    """What goes before a command so that file permissions hold for it, whoever runs the tests; else skips the test."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may read and write anywhere, and setpriv is not there")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run `cbatch ARGUMENTS` in this process, with the real engine; return exit code and streams."""
    monkeypatch.setattr(sys, "argv", ["cbatch", *arguments])
    code = app.main()
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def shell(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which "$@" is the program, in an environment with nothing but PATH and what is given."""
    command = ["sh", "-c", script, "sh", *STUB]
    names = {"PATH": os.environ["PATH"]} | environment
    return subprocess.run(command, cwd=cwd, env=names, capture_output=True, text=True, timeout=TIMEOUT_S)


def run_on_terminal(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run `cbatch ARGUMENTS` with standard error on a pseudo-terminal, to its good end; return what it shows there."""
    master, slave = pty.openpty()
    names = os.environ | {"TERM": "xterm"} | environment
    process = subprocess.Popen([*STUB, *arguments], cwd=cwd, env=names, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(master)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, b"")
    return shown.decode()


def write_input(folder: Path, *rows: Any) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "in.jsonl").write_text("".join(line + "\n" for line in lines))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
