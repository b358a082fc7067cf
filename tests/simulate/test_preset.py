"""The preset reproduces what was published, in its ratios; and splitting prompts is the best way to batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cbatch.config import SimulateConfig
from cbatch.simulate.comparison import UNPAGED, prepare_comparison
from cbatch.simulate.figures import Figures
from cbatch.simulate.presets import PREFILL_S, PREFILL_TOKENS, PRESETS

NAME = "h100-70b-fp8"
PUBLISHED_TOKENS_PER_S = {UNPAGED: 600, "continuous": 1800, "continuous+chunked": 2300}
PUBLISHED_ITL_P99_S = {"continuous": 0.050, "continuous+chunked": 0.015}
MODES = "continuous,continuous+chunked"


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Figures]]:
    comparison = prepare_comparison(SimulateConfig(preset=NAME, modes=MODES), {})
    return {case.name: comparison.run(case) for case in comparison.cases}


@pytest.mark.parametrize("name", PUBLISHED_TOKENS_PER_S)
def test_the_throughput_is_what_was_published(figures: dict[str, Figures], name: str) -> None:
    best = "continuous+chunked"
    ratio = figures[name].output_tokens_per_s / figures[best].output_tokens_per_s
    assert ratio == pytest.approx(PUBLISHED_TOKENS_PER_S[name] / PUBLISHED_TOKENS_PER_S[best], rel=0.1)
    assert figures[name].output_tokens_per_s == pytest.approx(PUBLISHED_TOKENS_PER_S[name], rel=0.1)


def test_splitting_prompts_shortens_the_time_between_tokens_as_published(figures: dict[str, Figures]) -> None:
    whole, split = figures["continuous"], figures["continuous+chunked"]
    published = PUBLISHED_ITL_P99_S["continuous"] / PUBLISHED_ITL_P99_S["continuous+chunked"]
    assert whole.itl_p99_s / split.itl_p99_s == pytest.approx(published, rel=0.1)
    assert split.ttft_mean_s < whole.ttft_mean_s


def test_a_long_prompt_takes_as_long_as_published() -> None:
    assert PRESETS[NAME].cost.step_s(PREFILL_TOKENS, 0, 0, 0) == pytest.approx(PREFILL_S)
