"""Units and their spelling. A leaf: imports nothing of cbatch."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

THREE_DIGITS = 999.5  # from here on a number rounds to four


def format_bytes(num_bytes: float) -> str:
    """Spell a byte count with three significant digits, or those before the point: 1536 → '1.5 KiB'."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if (number := num_bytes / size) >= 1:
            return f"{number:.3g} {unit}" if number < THREE_DIGITS else f"{number:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def parse_duration(text: str) -> float:
    """Read a duration in seconds: '90s', '10m', '1h30m'. Raises ValueError; a number without a unit says too little."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    total = 3600.0 * hours + 60 * minutes + seconds
    if total == 0:
        raise ValueError(text)
    return total


def format_duration(seconds: float) -> str:
    """Spell a duration in whole seconds as `parse_duration` reads it: 5400 → '1h30m'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    words = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count]
    return "".join(words) or "0s"


def format_seconds(seconds: float) -> str:
    """Spell any time with three significant digits, from ten minutes on as a duration: 0.0254 → '25.4 ms'."""
    rounded = float(f"{seconds:.3g}")
    if rounded >= 600:
        return format_duration(seconds)
    value, unit = (rounded, "s") if rounded >= 1 else (rounded * 1e3, "ms")
    return f"{value:#.3g}".rstrip(".") + f" {unit}"
