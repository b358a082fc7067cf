"""A fresh machine gets exactly what was tested: every package that cbatch needs, directly or not, is pinned."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

LINES = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINNED = {canonicalize_name(Requirement(line).name): Requirement(line) for line in LINES if not line.startswith("#")}


def needed(project: str, extras: frozenset[str], seen: dict[str, frozenset[str]]) -> None:
    """Add to `seen` every package that `project` with these extras needs here."""
    if seen.get(project, frozenset()) >= extras and project in seen:
        return
    seen[project] = seen.get(project, frozenset()) | extras
    try:
        lines = requires(project) or []
    except PackageNotFoundError:  # what is not installed cannot say what it needs
        lines = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)


def test_every_package_is_pinned_to_one_version() -> None:
    seen: dict[str, frozenset[str]] = {}
    needed("cbatch", frozenset({"dev"}), seen)
    # A CUDA build of torch brings NVIDIA's own packages, whose versions it pins itself.
    unpinned = {name for name in seen if name not in PINNED and not name.startswith(("nvidia-", "cuda-"))}
    assert unpinned == {"cbatch"}
    assert all(str(requirement.specifier).startswith("==") for requirement in PINNED.values())


def test_the_pins_are_within_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for requirement in map(Requirement, lines):
        if requirement.name != "cbatch":
            (pin,) = PINNED[canonicalize_name(requirement.name)].specifier
            assert requirement.specifier.contains(pin.version), requirement


def test_a_checkout_holds_no_second_package_named_kernels() -> None:
    """With an __init__.py, kernels/ would stand in the way of a package of that name that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
