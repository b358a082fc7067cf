"""The whole memory system against `generate()`: the same tokens, however little memory there is.

Every triple of settings and family occurs together in some case of the covering array (every pair in the default
one), over pools that never hold all rows at once. Pages hold NaN until something is written to them. References are
computed once for each family.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cbatch.config import EngineConfig, SamplingParams
from cbatch.engine.cache.build import build_cache
from cbatch.engine.engine import Engine
from cbatch.engine.request import Prompt, RequestOutput
from cbatch.engine.runner import ModelRunner
from cbatch.engine.sizing import page_bytes
from cbatch.errors import UnsupportedModelError
from cbatch.models.inspect import inspect_model
from cbatch.models.load import LoadedModel, load_model
from cbatch.units import GIB
from tests.conftest import ROOT
from tests.engine.drafts import know
from tests.engine.reference import Reference, count_near_ties, generate_references
from tests.tiny_models import WINDOW, build_tiny

FULL_FAMILIES = ["llama", "mixtral", "qwen3_moe", "smollm3", "gpt_neox"]
WINDOW_FAMILIES = ["mistral_window", "gemma2", "gemma3", "gpt_oss", "cohere2", "olmo3"]
PAGE_SIZE = 4
ALL = 512
FACTORS: dict[str, list[object]] = {
    "family": [*FULL_FAMILIES, *WINDOW_FAMILIES],
    "pool": ["starving", "tight", "ample"],
    "moves": ["offload", "soft reset", "both"],
    "max_batch_tokens": [3, PAGE_SIZE + 1, ALL],
    "scheduler_type": ["fifo", "prefill_first", "offline"],
    "sharing": [True, False],
    "arrival": ["given", "shuffled", "trickled"],
    "drafts": [False, True],
}
FEW_HOST_BLOCKS = 4  # enough for the least that moves out, not for the most


@dataclass(frozen=True)
class Case:
    """One combination of the factors."""

    family: str
    pool: str
    moves: str
    max_batch_tokens: int
    scheduler_type: str
    sharing: bool
    arrival: str
    drafts: bool = False

    def __str__(self) -> str:
        sharing = "sharing" if self.sharing else "alone"
        values = [self.family, self.pool, self.moves, self.max_batch_tokens, self.scheduler_type, sharing, self.arrival]
        return "-".join(str(value) for value in [*values, *["drafts"] * self.drafts])


Combination = tuple[tuple[str, object], ...]


def combinations(case: Mapping[str, object], strength: int) -> set[Combination]:
    return set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), strength))


def all_combinations(strength: int) -> list[Combination]:
    names = itertools.combinations(sorted(FACTORS), strength)
    return [
        tuple(zip(chosen, values, strict=True))
        for chosen in names
        for values in itertools.product(*(FACTORS[name] for name in chosen))
    ]


def draw(strength: int) -> list[Case]:
    """Cover all combinations of `strength` factors, greedily; allpairspy covers pairs only."""
    rng = random.Random(strength)
    missing = dict.fromkeys(all_combinations(strength))
    cases = []
    while missing:
        first = dict(next(iter(missing)))
        tries = [{name: rng.choice(values) for name, values in FACTORS.items()} | first for _ in range(40)]
        best = max(tries, key=lambda case: len(combinations(case, strength) & missing.keys()))
        for found in combinations(best, strength) & missing.keys():
            del missing[found]
        cases.append(Case(**best))  # type: ignore[arg-type]
    return cases


PAIRS = draw(2)
TRIPLES = [case for case in draw(3) if case not in PAIRS]


@dataclass(frozen=True)
class Family:
    """A tiny model in memory and what `generate()` makes of the prompts."""

    loaded: LoadedModel
    references: list[Reference]


def make_prompts() -> tuple[list[list[int]], list[int]]:
    """Short prompts with long completions, which outgrow any pool, and long ones; all pass the window of 16."""
    rng = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(count)]

    header = tokens(3 * PAGE_SIZE)
    prompts = [tokens(10), tokens(2 * WINDOW + 3), tokens(1), tokens(PAGE_SIZE)]
    prompts += [header + tokens(n) for n in (1, 3)]
    prompts += [list(prompts[4]), header]
    return prompts, [34, 6, 18, 17, 14, 12, 9, 20]


PROMPTS, MAX_TOKENS = make_prompts()
LONGEST = max(len(prompt) + more - 1 for prompt, more in zip(PROMPTS, MAX_TOKENS, strict=True))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            folder = build_tiny(name, tmp_path_factory.mktemp(name))
            config = EngineConfig(model=str(folder), dtype="float32")
            loaded = load_model(config, inspect_model(config))
            made[name] = Family(loaded, generate_references(folder, PROMPTS, MAX_TOKENS))
        return made[name]

    return make


def smallest_pool(loaded: LoadedModel, max_batch_tokens: int) -> int:
    """Count the whole-model blocks that hold the longest row alone."""
    shape = loaded.shape
    for num_blocks in range(1, ALL):
        cache = build_cache(
            shape.sliding_windows,
            num_blocks=num_blocks,
            page_size=PAGE_SIZE,
            max_batch_tokens=max_batch_tokens,
            max_model_len=shape.context_length,
            allow_block_sharing=False,
        )
        if cache.max_tokens_ever >= LONGEST:
            return num_blocks
    raise AssertionError


def make_engine(loaded: LoadedModel, case: Case) -> Engine:
    smallest = smallest_pool(loaded, case.max_batch_tokens)
    num_blocks = {"starving": smallest + 1, "tight": smallest * 3 // 2, "ample": smallest * len(PROMPTS)}[case.pool]
    page = page_bytes(loaded.shape, loaded.dtype, PAGE_SIZE)
    host_blocks = {"offload": num_blocks * len(PROMPTS), "soft reset": 0, "both": FEW_HOST_BLOCKS}[case.moves]
    config = EngineConfig(
        model=case.family,
        dtype="float32",
        page_size=PAGE_SIZE,
        num_blocks=num_blocks,
        max_batch_tokens=case.max_batch_tokens,
        max_requests_per_batch=len(PROMPTS) * (1 + case.drafts),
        speculation=case.drafts,
        scheduler_type=case.scheduler_type,
        safety_margin=0.0,
        allow_block_sharing=case.sharing,
        cpu_offload_space=host_blocks * loaded.shape.num_layers * page / GIB,
    )
    engine = Engine.over(loaded, config)
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """Fill the memory of cache and host with what ruins every result that it gets into."""
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    for pages in (runner.key_pages, runner.value_pages, runner.host_key_pages, runner.host_value_pages):
        pages.fill_(float("nan"))


def arriving(arrival: str) -> Iterator[Prompt | None]:
    rows = list(range(len(PROMPTS)))
    if arrival != "given":
        random.Random(3).shuffle(rows)
    for row in rows:
        yield Prompt(row, PROMPTS[row], SamplingParams(max_tokens=MAX_TOKENS[row], ignore_eos=True))
        if arrival == "trickled":
            yield from [None] * 4


def check(engine: Engine, references: list[Reference], arrival: str) -> None:
    """Run all rows; the tokens are the reference's, the counts add up and nothing stays behind."""
    outputs: dict[int, RequestOutput] = {o.request_id: o for step in engine.steps(arriving(arrival)) for o in step}
    assert sorted(outputs) == list(range(len(PROMPTS)))
    assert all(output.finish_reason == "length" for output in outputs.values())
    ties = count_near_ties(references, [outputs[row].token_ids for row in range(len(PROMPTS))])
    assert ties <= 1, "near ties are to be rare"
    stats, metrics = engine.stats, [output.metrics for output in outputs.values()]
    assert stats.output_tokens == sum(MAX_TOKENS)
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.computed_tokens + stats.cached_tokens == stats.prompt_tokens + stats.output_tokens - len(PROMPTS)
    assert stats.preemptions == stats.offloads + stats.soft_resets == sum(m.preemptions for m in metrics)
    assert stats.offloads == stats.restores
    assert stats.recomputed_tokens == sum(m.recomputed_tokens for m in metrics)
    assert (stats.cache_usage, stats.num_running, stats.num_waiting) == (0.0, 0, 0)
    assert engine._scheduler.offload.num_free_host_pages == engine.plan.num_host_pages


def check_moves(engine: Engine, case: Case) -> None:
    """What the case is meant to force has happened, and nothing else."""
    stats = engine.stats
    if case.pool == "ample":
        assert stats.preemptions == 0
    # The offline policy keeps room for what rows grow to.
    is_starving = case.pool == "starving" and case.scheduler_type != "offline"
    if is_starving:
        assert stats.preemptions > 0
    # Where prompts are prefilled in crumbs, or rows end sooner, all that moves out may be small.
    if is_starving and case.moves == "both" and case.max_batch_tokens > 3 and not case.drafts:
        assert stats.offloads > 0
        assert stats.soft_resets > 0
    if case.moves == "offload":
        assert stats.soft_resets == stats.recomputed_tokens == 0
    if case.moves == "soft reset":
        assert stats.offloads == 0
    if not case.sharing or case.family in WINDOW_FAMILIES:
        assert stats.cached_tokens == 0
        assert stats.recomputed_tokens > 0 or stats.soft_resets == 0


def check_case(family: Family, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a case; where it drafts, mostly from the references themselves."""
    know(monkeypatch, [[*p, *r.token_ids] for p, r in zip(PROMPTS, family.references, strict=True)])
    engine = make_engine(family.loaded, case)
    check(engine, family.references, case.arrival)
    check_moves(engine, case)
    stats = engine.stats
    assert (0 < stats.accepted_tokens < stats.drafted_tokens) if case.drafts else stats.drafted_tokens == 0


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_tokens_equal_those_of_generate(
    family: Callable[[str], Family], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(family(case.family), case, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("case", TRIPLES, ids=str)
def test_tokens_equal_those_of_generate_in_the_wider_draw(
    family: Callable[[str], Family], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(family(case.family), case, monkeypatch)


@pytest.mark.parametrize("name", FACTORS["family"])
def test_references_do_not_collapse(family: Callable[[str], Family], name: str) -> None:
    """A model that says one token for ever would hide most mistakes."""
    assert len({token for reference in family(name).references for token in reference.token_ids}) > 10


# What published engines got wrong on windows


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_long_prompt_repeated_on_a_hybrid_model_gives_the_same_answer_every_time(
    family: Callable[[str], Family], name: str
) -> None:
    """Prefix sharing asked for, one request at a time, prompts beyond the window, one after the other and equal."""
    loaded = family(name).loaded
    settings = {"page_size": PAGE_SIZE, "num_blocks": 64, "max_requests_per_batch": 1}
    engine = Engine.over(loaded, EngineConfig(model=name, allow_block_sharing=True, **settings))  # type: ignore[arg-type]
    assert not engine.plan.allow_block_sharing
    assert "sliding" in engine.plan.reasons["allow_block_sharing"]
    row = 1  # the longest prompt
    header = PROMPTS[row]
    params = SamplingParams(max_tokens=MAX_TOKENS[row], ignore_eos=True)
    same = [Prompt(i, header, params) for i in range(4)]
    others = [Prompt(4 + i, [*header[: 8 * PAGE_SIZE], 7 + i, 9], params) for i in range(2)]
    outputs = {output.request_id: output for output in engine.generate([*same, *others])}
    count_near_ties([family(name).references[row]] * 4, [outputs[i].token_ids for i in range(4)])
    assert len({tuple(outputs[i].token_ids) for i in range(4)}) == 1
    for prompt in others:  # as if alone
        (alone,) = Engine.over(loaded, EngineConfig(model=name, **settings)).generate([prompt])  # type: ignore[arg-type]
        assert outputs[prompt.request_id].token_ids == alone.token_ids
    assert engine.stats.cached_tokens == 0


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_survive_prefix_hits_and_moves(family: Callable[[str], Family], name: str) -> None:
    case = Case(name, "starving", "both", PAGE_SIZE + 1, "fifo", sharing=True, arrival="given")
    engine = make_engine(family(name).loaded, case)
    check(engine, family(name).references, case.arrival)
    assert engine.stats.cached_tokens > 0
    assert engine.stats.preemptions > 0


def test_a_window_that_the_model_ignores_is_no_wrong_answer_but_a_refusal(family: Callable[[str], Family]) -> None:
    loaded = family("llama").loaded
    windowed = replace(loaded, shape=replace(loaded.shape, sliding_windows=(WINDOW, WINDOW)))
    engine = Engine.over(windowed, EngineConfig(model="llama", num_blocks=64))
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        list(engine.generate([Prompt(0, PROMPTS[0], SamplingParams(max_tokens=4))]))


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(60, None), (60, 4), (63, None), (63, 1)])
def test_learned_positions_are_never_outrun(tmp_path: Path, num_prompt: int, max_tokens: int | None) -> None:
    """Positions end at 64: an index beyond them would crash, on a GPU beyond recovery."""
    config = EngineConfig(model=str(build_tiny("gpt2", tmp_path, max_position_embeddings=64)), dtype="float32")
    engine = Engine.load(config)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    lengths = (num_prompt, 64, 65, 5)
    outputs = {o.request_id: o for o in engine.generate(Prompt(n, [9] * n, params) for n in lengths)}
    assert (outputs[num_prompt].finish_reason, len(outputs[num_prompt].token_ids)) == ("length", 64 - num_prompt)
    assert [outputs[n].finish_reason for n in (64, 65)] == ["error", "error"]
    assert len(outputs[5].token_ids) == (max_tokens or 59)


# Counts


def test_waste_and_usage_are_those_of_the_cache_while_steps_run(family: Callable[[str], Family]) -> None:
    settings = {"page_size": 16, "num_blocks": 20, "max_batch_tokens": ALL}
    engine = Engine.over(family("llama").loaded, EngineConfig(model="llama", **settings))  # type: ignore[arg-type]
    prompt = [7] * 100
    list(engine.generate([Prompt(0, prompt, SamplingParams(max_tokens=2, ignore_eos=True))]))
    # Seven blocks of 16 slots hold 100 tokens, and then 101.
    assert engine.stats.kv_waste_fraction == pytest.approx((12 + 11) / 2 / 112)
    assert engine.stats.mean_cache_usage == engine.stats.max_cache_usage == pytest.approx(7 / 20)


def test_a_failure_is_no_token(tmp_path: Path) -> None:
    config = EngineConfig(model=str(build_tiny("llama", tmp_path)), dtype="float32", num_blocks=64)
    loaded = load_model(config, inspect_model(config))
    loaded.model.get_input_embeddings().weight.data[17] = float("nan")
    engine = Engine.over(loaded, config)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = list(engine.generate([Prompt(0, [5, 17], params), Prompt(1, [5, 6], params)]))
    assert sum(output.error is not None for output in outputs) == 1
    assert engine.stats.output_tokens == sum(len(output.token_ids) for output in outputs) == 3


# The real thing


@pytest.fixture(scope="module")
def gemma3() -> Path:
    """The folder of Gemma 3 270M, a hybrid model with a window of 512; without it the test is skipped.

    No package index has it, and the hub asks for a licence, so that no test can fetch it.
    """
    folder = Path(os.environ.get("CBATCH_TEST_GEMMA3", ROOT / ".models" / "gemma3"))
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no model in {folder}: hf download google/gemma-3-270m --local-dir {folder}")
    return folder


def beyond_the_window(folder: Path, num_rows: int) -> list[list[int]]:
    """Prompts of 600 tokens of English, each from another place; their completions begin a new page each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer((ROOT / "LICENSE").read_text()).input_ids
    starts = random.Random(2).sample(range(1, len(text) - 600), num_rows)
    return [[text[0], *text[start : start + 599]] for start in starts]


def check_real_model(folder: Path, num_rows: int, max_tokens: int) -> tuple[Engine, int]:
    """Compare rows that move out and come back with `generate()`; count those that part from it at a near tie."""
    prompts = beyond_the_window(folder, num_rows)
    references = generate_references(folder, prompts, [max_tokens] * num_rows)
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=1024,
        max_batch_tokens=256,
        page_size=16,
        num_blocks=77,  # two prompts, and nothing for what comes after them
        safety_margin=0.0,
        cpu_offload_space=0.05,
    )
    engine = Engine.load(config)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    rows = [Prompt(row, prompt, params) for row, prompt in enumerate(prompts)]
    outputs = sorted(engine.generate(rows), key=lambda output: output.request_id)
    assert len({tuple(reference.token_ids) for reference in references}) == num_rows
    return engine, count_near_ties(references, [output.token_ids for output in outputs])


@pytest.mark.real_model
def test_gemma_3_beyond_its_window(gemma3: Path) -> None:
    engine, num_near_ties = check_real_model(gemma3, num_rows=20, max_tokens=32)
    assert num_near_ties <= 1
    assert engine.stats.output_tokens == 20 * 32
    assert engine.stats.offloads == engine.stats.restores > 0
    assert engine.plan.layer_windows.count(512) == 15
