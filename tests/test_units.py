"""How bytes and durations are spelled."""

from __future__ import annotations

import re

import pytest

from cbatch.units import GIB, KIB, MIB, TIB, format_bytes, format_duration, format_seconds, parse_duration


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1.5 * KIB, "1.5 KiB"),
        (614.4 * MIB, "614 MiB"),
        (21.34 * GIB, "21.3 GiB"),
        (4530 * GIB, "4.42 TiB"),
        (1023.4 * MIB, "1023 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_three_digits_and_the_largest_unit_below(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_units_grow_by_1024() -> None:
    assert [1024**power for power in (1, 2, 3, 4)] == [KIB, MIB, GIB, TIB]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), (" 2m5s ", 125), ("1h1m1s", 3661)]
)
def test_durations_are_read_and_spelled_alike(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 ms"),
        (0.00012345, "0.123 ms"),
        (0.02536, "25.4 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (75.44, "75.4 s"),
        (278.44, "278 s"),
        (599.6, "10m"),
        (9270, "2h34m30s"),
    ],
)
def test_any_time_is_spelled_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("text", ["", "10", "0s", "soon", "10 m", "-5m", "1.5h", "5m1h", "1d", "10M"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_duration(text)
