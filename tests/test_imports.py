"""Who may import whom, read off the source: imports inside functions count too, those for type checkers do not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("cbatch", "cbatch_kernels")
HEAVY = ("torch", "transformers", "triton")
MOST_LINES = 60  # of a function: what fits a screen
FILES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for base, package in ((ROOT, "cbatch"), (ROOT / "kernels", "cbatch_kernels"))
    for path in sorted((base / package).rglob("*.py"))
}

# What each part may import, itself aside. The first name that a module's own name starts with counts.
ALLOWED: dict[str, tuple[str, ...]] = {
    "cbatch.compatibility": ("cbatch.errors",),
    "cbatch.config": (),
    "cbatch.errors": (),
    "cbatch.units": (),
    "cbatch.__main__": ("cbatch.cli",),
    "cbatch.cli": (
        "cbatch.bench",
        "cbatch.diagnose",
        "cbatch.io",
        "cbatch.jobs",
        "cbatch.planning",
        "cbatch.report",
        "cbatch.simulate",
        "cbatch.tune",
    ),
    "cbatch.planning": ("cbatch.simulate", "cbatch.jobs", "cbatch.engine", "cbatch.models", "cbatch.io"),
    "cbatch.bench": ("cbatch.jobs", "cbatch.engine", "cbatch.models", "cbatch.io"),
    "cbatch.report": ("cbatch.jobs", "cbatch.engine", "cbatch.io"),
    "cbatch.diagnose": ("cbatch.simulate", "cbatch.jobs", "cbatch.engine", "cbatch.models", "cbatch.io"),
    "cbatch.simulate": ("cbatch.jobs", "cbatch.engine", "cbatch.io"),
    "cbatch.tune": ("cbatch.jobs", "cbatch.engine", "cbatch.models", "cbatch.io"),
    "cbatch.jobs": ("cbatch.engine", "cbatch.models", "cbatch.io"),
    "cbatch.io": (),
    "cbatch.engine": ("cbatch.models", "cbatch_kernels"),
    "cbatch.models": ("cbatch_kernels",),
    "cbatch_kernels": (),
    "cbatch": ("cbatch",),  # the package's own __init__: the Python API, re-exported
}
LEAVES = ("cbatch.compatibility", "cbatch.config", "cbatch.errors", "cbatch.units")

# Where the logic is that must be testable in milliseconds. Anywhere at all, or only outside functions.
NEVER_HEAVY = ("cbatch.config", "cbatch.errors", "cbatch.units", "cbatch.io", "cbatch.cli", "cbatch.engine.request")
NEVER_HEAVY += ("cbatch.engine.scheduler", "cbatch.engine.cache", "cbatch.engine.stopping", "cbatch.engine.stats")
NOT_AT_IMPORT = ("cbatch.jobs",)


def within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def imports(module: str, *, inside_functions: bool) -> Iterator[str]:
    """Every module that `module` imports, `from x import y` as both x and x.y where that is one of ours."""
    path = FILES[module]
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                source = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [source])])
            yield source
            yield from (f"{source}.{name.name}" for name in node.names if f"{source}.{name.name}" in FILES)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack += node.orelse
            if inside_functions:  # the direction holds for types too
                stack += node.body
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_one_way(module: str) -> None:
    part = next(part for part in ALLOWED if within(module, part))
    allowed = (*ALLOWED[part], *LEAVES, part) if part not in LEAVES else ALLOWED[part]
    for imported in imports(module, inside_functions=True):
        ours = imported.split(".")[0] in OURS and imported != "cbatch"
        assert not ours or any(within(imported, other) for other in allowed), f"{module} imports {imported}"


@pytest.mark.parametrize("module", [module for module in FILES if any(within(module, part) for part in NEVER_HEAVY)])
def test_bookkeeping_never_imports_torch(module: str) -> None:
    assert not heavy(imports(module, inside_functions=True))


@pytest.mark.parametrize("module", [module for module in FILES if any(within(module, part) for part in NOT_AT_IMPORT)])
def test_jobs_import_torch_only_inside_functions(module: str) -> None:
    assert not heavy(imports(module, inside_functions=False))


def heavy(modules: Iterator[str]) -> list[str]:
    return [module for module in modules if module.split(".")[0] in HEAVY]


def test_the_walk_sees_an_import_inside_a_function() -> None:
    assert "cbatch.jobs.run" in imports("cbatch.cli.run", inside_functions=True)
    assert "cbatch.jobs.run" not in imports("cbatch.cli.run", inside_functions=False)


@pytest.mark.parametrize(
    "argument", ["--help", "run --help", "tune --help", "bench --help", "plan --help", "--version"]
)
def test_help_loads_nothing_heavy(argument: str) -> None:
    code = (
        f"import sys; sys.argv = ['cbatch', *{argument.split()!r}]\n"
        "from cbatch.cli.app import main\n"
        "code = main()\n"
        "loaded = sorted({'torch', 'transformers', 'pyarrow', 'numpy', 'rich'} & set(sys.modules))\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines, a kernel's without its parameters, of which it has one for every stride."""
    assert function.end_lineno is not None
    is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)
    return function.end_lineno - (function.body[0].lineno if is_kernel else function.lineno) + 1


def test_files_and_functions_fit_a_reader() -> None:
    outsized = []
    for path in [*FILES.values(), *sorted((ROOT / "sample_jobs").rglob("*.py")), *(ROOT / "kernels").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            outsized.append(f"{path.name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > MOST_LINES:
                outsized.append(f"{path.name}:{node.lineno} {node.name}: {length(node)} lines")
    assert not outsized
