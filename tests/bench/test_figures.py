"""The figures of a run by hand-computed cases: what is counted, from when, and over what."""

from __future__ import annotations

import pytest

from cbatch.bench.figures import Figures, measure, medians
from cbatch.jobs.totals import Targets

# Three rows: first tokens at 1, 2 and 3 s; gaps of 1 and 3, of 0.5, and none.
TIMES = [[1.0, 2.0, 5.0], [2.0, 2.5], [3.0]]


def test_speed_is_all_tokens_over_the_time_to_the_last_one() -> None:
    figures = measure(TIMES, Targets(), load_s=9.0)
    assert figures.output_tokens_per_s == pytest.approx(6 / 5.0)
    assert (figures.generate_s, figures.load_s) == (5.0, 9.0)


def test_first_tokens_count_from_the_start_and_gaps_over_all_pairs_of_tokens() -> None:
    figures = measure(TIMES, Targets())
    assert figures.ttft_mean_s == pytest.approx(2.0)
    assert figures.ttft_p99_s == pytest.approx(2.98)  # between the second and the third of three
    assert figures.itl_mean_s == pytest.approx((1 + 3 + 0.5) / 3)
    assert figures.itl_p99_s == pytest.approx(2.96)


def test_a_gap_in_fifty_that_is_long_shows_in_the_tail_and_hardly_in_the_mean() -> None:
    smooth = [[1.0 + 0.01 * i for i in range(51)] for _ in range(4)]
    stalled = [[1.0 + 0.01 * i + (i > 40) for i in range(51)] for _ in range(4)]
    assert measure(smooth, Targets()).itl_p99_s == pytest.approx(0.01)
    figures = measure(stalled, Targets())
    assert (figures.itl_p99_s, figures.itl_mean_s) == (pytest.approx(1.01), pytest.approx(0.03))


@pytest.mark.parametrize(
    ("targets", "good_tokens", "good_rows"),
    [
        (Targets(ttft_s=2.0), 5, 2 / 3),  # a row that just keeps it is good
        (Targets(ttft_s=1.9), 3, 1 / 3),
        (Targets(itl_s=2.0), 6, 1.0),  # the mean of 1 and 3 is 2; a single token has no gap
        (Targets(itl_s=1.9), 3, 2 / 3),
        (Targets(ttft_s=2.5, itl_s=1.0), 2, 1 / 3),
        (Targets(ttft_s=0.5), 0, 0.0),
    ],
)
def test_goodput_is_the_tokens_of_the_rows_that_kept_every_target(
    targets: Targets, good_tokens: int, good_rows: float
) -> None:
    figures = measure(TIMES, targets)
    assert figures.goodput_tokens_per_s == pytest.approx(good_tokens / 5.0)
    assert figures.good_rows == pytest.approx(good_rows)


def test_without_targets_there_is_no_goodput() -> None:
    figures = measure(TIMES, Targets())
    assert (figures.goodput_tokens_per_s, figures.good_rows) == (None, None)


def test_rows_of_one_token_have_no_time_between_tokens() -> None:
    figures = measure([[0.5], [1.5]], Targets(itl_s=0.001))
    assert (figures.itl_mean_s, figures.itl_p99_s) == (None, None)
    assert figures.goodput_tokens_per_s == pytest.approx(2 / 1.5)


def make(speed: float, **others: float) -> Figures:
    values = {"generate_s": 1.0, "load_s": 1.0, "ttft_mean_s": None, "ttft_p99_s": None, "itl_mean_s": None}
    return Figures(**({"output_tokens_per_s": speed, "itl_p99_s": None} | values | others))  # type: ignore[arg-type]


def test_the_median_of_every_figure_is_taken_by_itself() -> None:
    found = medians([make(10, itl_p99_s=5.0), make(30, itl_p99_s=1.0), make(20, itl_p99_s=9.0)])
    assert (found.output_tokens_per_s, found.itl_p99_s, found.ttft_p99_s) == (20, 5.0, None)
