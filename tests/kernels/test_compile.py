"""Building the kernels: once a machine, by many at once, and with one readable line where it cannot be done."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cbatch_kernels import compile as module
from cbatch_kernels.compile import CompiledKernels

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, module.COMPILERS)) and "CI" not in os.environ, reason="there is no compiler"
)


def load() -> CompiledKernels:
    """As in a process that has not loaded them yet."""
    module._warn.cache_clear()
    return module.load_kernels.__wrapped__(torch.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and sources that are built in no time."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    for name in ("parallel.h", "library.cpp"):
        shutil.copy(module.SOURCES / name, sources)
    monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cbatch"


def fake_compiler(tmp_path: Path, script: str) -> str:
    """A compiler that tells its version and then runs the script."""
    file = tmp_path / "fake-c++"
    file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n{script}\n')
    file.chmod(0o755)
    return str(file)


def built(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_the_library_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    assert first.library is not None
    assert first.reason.startswith("built with ")
    assert first.instructions
    monkeypatch.setattr(module, "_compile", None)  # whoever compiled would fail
    assert load().library is not None
    assert built(folder).suffix == ".so"


def test_a_file_named_for_a_type_is_in_its_library_only(folder: Path) -> None:
    for name in ("float32", "bfloat16"):
        code = f'#include "parallel.h"\nCBATCH_API int cbatch_only_{name}() {{ return 7; }}\n'
        (module.SOURCES / f"only_{name}.cpp").write_text(code)
    library = load().library
    assert library is not None
    assert library.cbatch_only_float32() == 7
    assert not hasattr(library, "cbatch_only_bfloat16")
    before = built(folder)
    (module.SOURCES / "only_bfloat16.cpp").write_text("other types' files do not count")
    load()
    assert built(folder) == before


@pytest.mark.parametrize("what", ["FLAGS", "source", "compiler", "CPU"])
def test_whatever_the_library_depends_on_gives_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    load()
    if what == "FLAGS":
        monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-g"))
    elif what == "source":
        (module.SOURCES / "parallel.h").write_text("// changed\n" + (module.SOURCES / "parallel.h").read_text())
    elif what == "compiler":
        monkeypatch.setenv("CXX", fake_compiler(tmp_path, 'exec c++ "$@"'))
    else:
        (tmp_path / "cpuinfo").write_text("model name\t: another\nflags\t: none\n\nmodel name\t: not looked at\n")
        monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
    assert load().library is not None
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_a_damaged_file_is_built_again(folder: Path, damage: str) -> None:
    load()
    file = built(folder)
    content = file.read_bytes()
    middle = len(content) // 2
    changed = {
        "empty": b"",
        "cut": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "text": b"not a library at all",
    }
    # As a new file: the old one is mapped into this process.
    file.unlink()
    file.write_bytes(changed[damage])
    assert load().library is not None
    assert module._is_whole(built(folder))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_many_processes_at_once_all_get_one(folder: Path) -> None:
    processes = multiprocessing.get_context("fork")
    with processes.Pool(4) as pool:
        reasons = pool.starmap(_load_and_say, [()] * 4, chunksize=1)
    assert len(set(reasons)) == 1
    assert reasons[0].startswith("built with ")
    assert module._is_whole(built(folder)), "nothing half done stays behind"


def _load_and_say() -> str:
    return load().reason


@pytest.fixture
def one_line(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Holds that each reason is logged once, as a line that fits a terminal's width or two."""
    reasons: list[str] = []
    with caplog.at_level(logging.WARNING):
        yield reasons
    messages = [record.getMessage() for record in caplog.get_records("call")]
    assert messages == [f"no compiled CPU kernels, so PyTorch's slower operations run: {reason}" for reason in reasons]
    assert all("\n" not in reason and len(reason) < 240 for reason in reasons)


@pytest.mark.parametrize(
    ("path", "cxx", "said"),
    [
        ("", None, "no C++ compiler was found (looked for c++, g++, clang++)"),
        (None, "no-such-compiler -O1", "no C++ compiler was found (CXX is 'no-such-compiler -O1')"),
        (None, "false", "no C++ compiler was found (CXX is 'false')"),
    ],
)
def test_without_a_compiler_it_is_said(
    monkeypatch: pytest.MonkeyPatch, one_line: list[str], path: str | None, cxx: str | None, said: str
) -> None:
    if path is not None:
        monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CXX", raising=False) if cxx is None else monkeypatch.setenv("CXX", cxx)
    assert load() == CompiledKernels(None, said)
    one_line.append(said)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'In file x:' >&2; echo 'a.cpp:1: error: no such thing' >&2; exit 1", "a.cpp:1: error: no such thing"),
        ("exit 3", "it ended with 3"),
        ("kill -9 $$", "it ended with -9"),
        ('while [ "$1" != -o ]; do shift; done; echo junk > "$2"', "cannot be opened"),
    ],
)
def test_a_broken_compiler_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: list[str], script: str, said: str
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    kernels = load()
    assert kernels.library is None
    assert said in kernels.reason
    one_line.append(kernels.reason)


def test_flags_that_a_compiler_does_not_know_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'for a in "$@"; do [ "$a" = -march=native ] && echo "error: unknown" >&2 && exit 1; done; exec c++ "$@"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    assert load().library is not None


@pytest.mark.parametrize("obstacle", ["a file in its place", "no home"])
def test_where_no_cache_can_be_written_this_process_builds_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(temporary))
    if obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        (tmp_path / "cache").write_text("in the way")
    kernels = load()
    assert kernels.library is not None
    assert kernels.library.cbatch_instruction_set()
    assert not list(temporary.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_is_read_only_is_read(folder: Path) -> None:
    load()
    folder.chmod(0o500)
    file = built(folder)
    assert load().library is not None
    file.write_bytes(b"damage")
    assert load().library is not None


def test_loops_run_on_the_threads_that_torch_has() -> None:
    """One OpenMP runtime is mapped, and a kernel starts no thread beside torch's."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "3", "XDG_CACHE_HOME": str(Path.home() / ".cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


THREADS = """
import os, torch
from cbatch_kernels import dispatch
torch.ones(10**6).exp_()
before = set(os.listdir("/proc/self/task"))
assert len(before) >= 3, before
keys, pages = torch.randn(4096, 2, 32), torch.zeros(300, 2, 16, 32)
dispatch.cache_write(keys, keys, pages, pages.clone(), torch.arange(4096))
assert torch.equal(pages[3, :, 5], keys[53])
assert dispatch.load_kernels(keys.dtype).library is not None
assert set(os.listdir("/proc/self/task")) == before
maps = {line.split()[-1] for line in open("/proc/self/maps") if "r-xp" in line}
assert sum("omp" in file for file in maps) == 1, maps
"""
