"""How bytes are spelled."""

from __future__ import annotations

import pytest

from cbatch.units import GIB, KIB, MIB, TIB, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1.5 * KIB, "1.5 KiB"),
        (614.4 * MIB, "614 MiB"),
        (21.34 * GIB, "21.3 GiB"),
        (4530 * GIB, "4.42 TiB"),
        (2**50, "1.02e+03 TiB"),
    ],
)
def test_three_digits_and_the_largest_unit_below(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_units_grow_by_1024() -> None:
    assert [KIB, MIB, GIB, TIB] == [1024**power for power in (1, 2, 3, 4)]
