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


@pytest.fixture(scope="module")
def arriving() -> dict[str, Figures]:
    """The same requests, 11 of them a second: more than whole prompts let through, less than split ones do."""
    modes = f"static,{MODES}"
    config = SimulateConfig(preset=NAME, rows=600, modes=modes, arrivals=11.0, goodput_ttft=5.0, goodput_itl=0.08)
    comparison = prepare_comparison(config, {})
    return {case.name: comparison.run(case) for case in comparison.cases}


def test_splitting_prompts_is_the_best_way_to_batch_mixed_traffic(arriving: dict[str, Figures]) -> None:
    """In throughput, goodput and time to the first token better than all others."""
    split = arriving.pop("continuous+chunked")
    assert split.goodput_tokens_per_s is not None
    for name, other in arriving.items():
        assert other.goodput_tokens_per_s is not None
        assert split.output_tokens_per_s > other.output_tokens_per_s, name
        assert split.goodput_tokens_per_s > other.goodput_tokens_per_s, name
        assert split.ttft_mean_s < other.ttft_mean_s, name
        assert split.ttft_p99_s < other.ttft_p99_s, name
    assert split.itl_mean_s < arriving["continuous"].itl_mean_s
    assert split.itl_p99_s < arriving["continuous"].itl_p99_s


def test_a_long_prompt_takes_as_long_as_published() -> None:
    assert PRESETS[NAME].cost.step_s(PREFILL_TOKENS, 0, 0, 0) == pytest.approx(PREFILL_S)
