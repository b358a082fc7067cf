"""Builds the C++ kernels of csrc/ with this machine's compiler when they are first needed, and opens them.

`load_kernels` is called by `dispatch`. A library holds csrc/*.cpp for one type of numbers: a file that is named for
another type is left out, since a run has one, and the others would take longer than all the rest. Libraries are kept in
the user's cache under a hash of sources, flags, compiler and CPU, so a home folder that different machines share holds
one for each, and nothing is built twice. The last bytes are a digest of the rest: a damaged file is built again, never
run. Processes that start at once may all build; each renames a finished file into place. Where the cache cannot be
written the library is built for this process alone.

The sources need no headers but the standard library's and run their loops on the threads of torch's own OpenMP
runtime, whose symbols torch has made visible (csrc/parallel.h). Leaves out what runs where nothing was built.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # brings the OpenMP runtime that the library is opened against

from cbatch_kernels.elements import ELEMENTS, element_name

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")  # where CXX names none
# Products and sums are fused only where the source says so: results must not depend on how a loop was compiled.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
)
NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
TIMEOUT_S = 120
CPU_INFO = Path("/proc/cpuinfo")
CPU_FIELDS = ("model name", "flags", "features", "cpu implementer", "cpu part")


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """The opened library and who built it; None where there is none, and `reason` then says why."""

    library: ctypes.CDLL | None
    reason: str
    instructions: str = ""  # what vectors are made of: other ones round otherwise


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles, and the first line of what it says of its version."""

    command: tuple[str, ...]
    version: str


class BuildError(Exception):
    """Why there are no compiled kernels, in one line."""


@cache
def load_kernels(dtype: torch.dtype) -> CompiledKernels:
    """Open the kernels for a type in ELEMENTS, building them first where this machine has not; once a process."""
    others = {element_name(other) for other in ELEMENTS if other != dtype}
    sources = [file for file in sorted(SOURCES.glob("*.cpp")) if file.stem.rpartition("_")[2] not in others]
    try:
        compiler = find_compiler()
        library = _open_cached(compiler, sources)
    except BuildError as error:
        _warn(str(error))
        return CompiledKernels(None, str(error))
    library.cbatch_instruction_set.restype = ctypes.c_char_p
    return CompiledKernels(library, f"built with {compiler.version}", library.cbatch_instruction_set().decode())


@cache
def _warn(reason: str) -> None:
    """Say once why there are none."""
    logger.warning("no compiled CPU kernels, so PyTorch's slower operations run: %s", reason)


def find_compiler() -> Compiler:
    """Find the C++ compiler: CXX where set, else the first of the usual names. Raises BuildError."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [[name] for name in COMPILERS]:
        if shutil.which(command[0]) is None:
            continue
        done = _run([*command, "--version"])
        if done.returncode == 0 and done.stdout:
            return Compiler(tuple(command), done.stdout.splitlines()[0])
    looked_for = f"CXX is '{shlex.join(asked)}'" if asked else f"looked for {', '.join(COMPILERS)}"
    raise BuildError(f"no C++ compiler was found ({looked_for})")


def _open_cached(compiler: Compiler, sources: Sequence[Path]) -> ctypes.CDLL:
    """Open the library in the cache, or one built anew. Raises BuildError."""
    name = f"cbatch-kernels-{_fingerprint(compiler, sources)}.so"
    folder = cache_folder()
    if folder is not None:
        file = folder / name
        try:
            if not _is_whole(file):
                folder.mkdir(parents=True, exist_ok=True)
                _build_into(file, compiler, sources)
            return ctypes.CDLL(str(file))
        except OSError as error:
            logger.info("the kernels are built for this process alone: %s", error)
    with tempfile.TemporaryDirectory(prefix="cbatch-kernels-") as temporary:
        file = Path(temporary) / name
        try:
            _build_into(file, compiler, sources)
            return ctypes.CDLL(str(file))  # stays mapped when the file is gone
        except OSError as error:
            raise BuildError(f"the built kernels cannot be opened: {error}") from error


def cache_folder() -> Path | None:
    """Give the user's cache; None where there is no home either."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "cbatch"
    try:
        return Path.home() / ".cache" / "cbatch"
    except RuntimeError:
        return None


def _fingerprint(compiler: Compiler, sources: Sequence[Path]) -> str:
    """Hash all that the built library depends on."""
    parts = [*compiler.command, compiler.version, *FLAGS, *map(repr, NATIVE_FLAGS), *_describe_cpu()]
    for source in [*sources, *sorted(SOURCES.glob("*.h"))]:
        parts += [source.name, source.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _describe_cpu() -> Iterator[str]:
    """Give what `native` depends on: model and instructions of the first core."""
    yield platform.machine()
    try:
        first_core = CPU_INFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        yield platform.processor()
        return
    yield from (line for line in first_core.splitlines() if line.lower().startswith(CPU_FIELDS))


def _is_whole(file: Path) -> bool:
    """Tell whether the file is there and ends in the digest of the rest."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _build_into(file: Path, compiler: Compiler, sources: Sequence[Path]) -> None:
    """Compile and link, and rename the result into place. Raises BuildError; OSError where files cannot be written."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="build-") as temporary:
        built = Path(temporary) / file.name
        for native in NATIVE_FLAGS:
            failure = _compile(built, sources, [*compiler.command, *FLAGS, *native])
            if failure is None:
                break
        else:
            raise BuildError(f"{compiler.command[0]} failed: {failure}")
        with built.open("ab") as output:
            output.write(hashlib.sha256(built.read_bytes()).digest())
        built.replace(file)


def _compile(built: Path, sources: Sequence[Path], command: list[str]) -> str | None:
    """Compile the sources side by side and link them; give the first line of what went wrong, if anything did."""
    objects = {source: built.with_name(f"{source.stem}.o") for source in sources}
    started = [
        subprocess.Popen(
            [*command, "-c", str(source), "-o", str(compiled)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for source, compiled in objects.items()
    ]
    failures = [_first_error(process.communicate()[1], process.returncode) for process in started]
    if any(failures):
        return next(filter(None, failures))
    done = _run([*command, "-shared", *map(str, objects.values()), "-o", str(built)])
    return _first_error(done.stderr, done.returncode)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler to its end. Raises BuildError where it does not start or end."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error


def _first_error(output: str, returncode: int) -> str | None:
    if returncode == 0:
        return None
    lines = output.splitlines() or [f"it ended with {returncode}"]
    return next((line for line in lines if "error" in line), lines[0]).strip()
