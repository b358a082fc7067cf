"""The engine against `generate()`: the same tokens, whatever the batch, page, chunk, order and sharing.

Every pair of settings occurs together in some case (a covering array), for every family; references are computed once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from allpairspy import AllPairs

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from tests.engine.reference import Reference, count_near_ties, generate_references
from tests.tiny_models import FULL_ATTENTION_FAMILIES, build_tiny

ALL = 10_000
# A budget is given by its relation to the page: (pages, tokens more).
BUDGETS = {"one": (0, 1), "page-1": (1, -1), "page": (1, 0), "page+1": (1, 1), "all": (0, ALL)}
CASES = list(
    AllPairs([[4, 16, 64], list(BUDGETS), [True, False], ["given", "shuffled"], [1, 64]]),
)


@dataclass(frozen=True)
class Family:
    """A tiny model in memory with its prompts and what `generate()` makes of them."""

    folder: Path
    loaded: LoadedModel
    prompts: list[list[int]]
    max_tokens: list[int]
    references: list[Reference]


def make_prompts() -> tuple[list[list[int]], list[int]]:
    """Lengths on both sides of page borders, common prefixes, one prompt twice, one a whole number of pages."""
    rng = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(count)]

    header = tokens(70)
    prompts = [tokens(1), tokens(3), tokens(17), tokens(64), tokens(65)]
    prompts += [header + tokens(n) for n in (1, 9, 30)]
    prompts += [header[:64], header[:64]]
    return prompts, [1, 9, 20, 12, 16, 12, 6, 12, 12, 18]


@pytest.fixture(scope="module", params=FULL_ATTENTION_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = build_tiny(request.param, tmp_path_factory.mktemp(request.param))
    prompts, max_tokens = make_prompts()
    config = EngineConfig(model=str(folder), dtype="float32")
    return Family(
        folder=folder,
        loaded=load_model(config, inspect_model(config)),
        prompts=prompts,
        max_tokens=max_tokens,
        references=generate_references(folder, prompts, max_tokens),
    )


@pytest.mark.parametrize(("page_size", "budget", "sharing", "order", "max_requests"), CASES)
def test_tokens_equal_those_of_generate(
    family: Family, page_size: int, budget: str, sharing: bool, order: str, max_requests: int
) -> None:
    pages, more = BUDGETS[budget]
    config = EngineConfig(
        model=str(family.folder),
        dtype="float32",
        page_size=page_size,
        max_batch_tokens=pages * page_size + more,
        max_requests_per_batch=max_requests,
        allow_block_sharing=sharing,
        num_blocks=1024 // page_size,
    )
    rows = list(range(len(family.prompts)))
    if order == "shuffled":
        random.Random(page_size).shuffle(rows)
    engine = Engine.over(family.loaded, config)
    outputs = {
        output.request_id: output
        for output in engine.generate(
            Prompt(row, family.prompts[row], SamplingParams(max_tokens=family.max_tokens[row], ignore_eos=True))
            for row in rows
        )
    }
    assert sorted(outputs) == sorted(rows)
    assert all(output.finish_reason == "length" for output in outputs.values())
    ties = count_near_ties(family.references, [outputs[row].token_ids for row in sorted(rows)])
    assert ties <= 1, "near ties are to be rare"
    if not sharing:
        assert engine.stats.cached_tokens == 0
    elif page_size < 64 or max_requests == 1:
        assert engine.stats.cached_tokens > 0


def test_references_do_not_collapse(family: Family) -> None:
    """A model that says one token for ever would hide most mistakes."""
    distinct = {token for reference in family.references for token in reference.token_ids}
    assert len(distinct) > 10


def test_the_covering_array_holds_every_pair() -> None:
    factors = [[4, 16, 64], list(BUDGETS), [True, False], ["given", "shuffled"], [1, 64]]
    for i, left in enumerate(factors):
        for j in range(i + 1, len(factors)):
            pairs = {(case[i], case[j]) for case in CASES}
            assert pairs == {(a, b) for a in left for b in factors[j]}
