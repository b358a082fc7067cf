"""What is simulated: distributions, arrivals, given lengths, and what is said of those that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.errors import InputError, UsageError
from cbatch.simulate.lengths import read_lengths
from cbatch.simulate.workload import GivenWorkload, Lengths, SyntheticWorkload, Work, arriving


def synthetic(**settings: Any) -> SyntheticWorkload:
    values = {"count": 5000, "prompt_tokens": Lengths.parse("20-60", 999), "output_tokens": Lengths.parse("7", 999)}
    return SyntheticWorkload(**values | settings)


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("512", 512, 512, 512),
        ("64-128", 64, 128, 96),
        ("lognormal:100:0.5", 1, 999, 100 * np.exp(0.125)),
        ("10-20*3,100-200*1", 10, 200, 0.75 * 15 + 0.25 * 150),
        ("2000", 999, 999, 999),
    ],
)
def test_lengths_are_drawn_as_they_are_spelled(text: str, low: int, high: int, mean: float) -> None:
    drawn = Lengths.parse(text, most=999).draw(np.random.default_rng(0), 20_000)
    assert (drawn.min() >= low, drawn.max() <= high) == (True, True)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "9-3",
        "0-4",
        "x",
        "3-",
        "lognormal:0:1",
        "lognormal:9:99",
        "5*0",
        "1,,2",
        "9" * 400,
        "5*" + "9" * 400,
    ],
)
def test_what_is_no_distribution_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="no distribution of lengths") as raised:
        Lengths.parse(text, most=999)
    assert "lognormal" in str(raised.value)


def test_a_workload_is_the_same_every_time_and_another_with_another_seed() -> None:
    assert list(synthetic()) == list(synthetic())
    assert list(synthetic()) != list(synthetic(seed=1))
    assert len(list(synthetic())) == len(synthetic()) == 5000


def test_arrivals_come_at_their_rate() -> None:
    works = list(synthetic(rate=20.0))
    times = [work.arrival_s for work in works]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5000 / 20, rel=0.05)
    given = arriving(GivenWorkload([Work(3, 4)] * 1000), rate=5.0, seed=0)
    assert list(given)[-1].arrival_s == pytest.approx(200, rel=0.1)
    assert {(work.prompt_tokens, work.output_tokens) for work in given} == {(3, 4)}


def test_a_shared_prefix_is_part_of_the_prompt() -> None:
    works = list(synthetic(shared_prefix=40))
    assert all(work.shared_tokens == min(work.prompt_tokens, 40) for work in works)
    assert synthetic(shared_prefix=40).shares
    assert not synthetic().shares


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_finished_runs_output_gives_its_lengths(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x", "prompt_tokens": 50, "completion_tokens": 9, "max_tokens": 100, "cached_tokens": 0},
        {"prompt": "x", "prompt_tokens": None, "completion_tokens": None, "error": {"code": "bad"}},
        {"prompt": "x", "prompt_tokens": 40, "completion_tokens": 1, "cached_tokens": 32},
        {"prompt": "x", "prompt_tokens": 10, "completion_tokens": 0, "cached_tokens": 0},
    ]
    workload = read_lengths(write(tmp_path / "out.jsonl", *rows))
    assert list(workload) == [Work(50, 9, shared_tokens=32), Work(40, 1, shared_tokens=32)]
    assert workload.shares


def test_a_file_of_ones_own_gives_its_lengths(tmp_path: Path) -> None:
    rows = [
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 4, "arrival_s": 2},
        {"prompt_tokens": 8, "output_tokens": 2, "arrival_s": 0.5},
    ]
    expected = [Work(8, 2, 0.5), Work(3, 4, 2.0)]
    assert list(read_lengths(write(tmp_path / "in.jsonl", *rows))) == expected
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    assert list(read_lengths(str(tmp_path / "in.jsonl.gz"))) == expected
    (tmp_path / "in.csv").write_text("prompt_tokens,max_tokens,arrival_s\n3,4,2.0\n8,2,0.5\n9,1,\n,,\n")
    assert list(read_lengths(str(tmp_path / "in.csv"))) == [Work(9, 1), *expected]


@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ({"prompt": "only text"}, InputError, "says how long"),
        ({"prompt_tokens": 3}, InputError, "completion_tokens"),
        ({"prompt_tokens": -3, "max_tokens": 4}, UsageError, "in.jsonl:1: prompt_tokens must be a whole number"),
        ({"prompt_tokens": 3, "max_tokens": "many"}, UsageError, "max_tokens must be"),
        *(
            ({"prompt_tokens": 3, "max_tokens": 4, "arrival_s": value}, UsageError, "arrival_s must be")
            for value in ("noon", -1, "nan", "inf", 1e11, True, [], 10**400)
        ),
    ],
)
def test_lengths_that_are_none_are_said(tmp_path: Path, row: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        read_lengths(write(tmp_path / "in.jsonl", row))
