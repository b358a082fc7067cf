"""Units and their spelling. A leaf: imports nothing of cbatch."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """Spell a byte count with three significant digits: 1536 → '1.50 KiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)
