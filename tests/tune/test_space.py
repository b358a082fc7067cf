"""What is searched: given options are held, values that cannot work or cannot show are not proposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from cbatch.config import EngineConfig
from cbatch.errors import DoesNotFitError, UsageError
from cbatch.tune.space import Space, Value, build_space, choose_names

MODEL = EngineConfig(model="m")


@dataclass(frozen=True, slots=True)
class Plan:
    page_size: int = 16
    num_blocks: int = 1000
    max_model_len: int = 4096
    max_batch_tokens: int = 512
    max_requests_per_batch: int = 128
    scheduler_type: str = "fifo"
    allow_block_sharing: bool = True

    def settings(self) -> dict[str, dict[str, object]]:
        return {}


def planner(default: Plan = Plan(), check: Callable[[Plan], None] | None = None) -> Callable[..., Plan]:
    """Plans as the engine does: no more requests than tokens, the cache's tokens whole pages."""

    def plan(settings: Mapping[str, Value]) -> Plan:
        values: dict[str, object] = dict(settings)
        planned = replace(default, **values)  # type: ignore[arg-type]
        cache_tokens = default.num_blocks * default.page_size
        requests = min(planned.max_requests_per_batch, planned.max_batch_tokens)
        planned = replace(planned, max_requests_per_batch=requests, num_blocks=cache_tokens // planned.page_size)
        if check is not None:
            check(planned)
        return planned

    return plan


def space_of(
    *names: str, plan: Callable[..., Plan] | None = None, num_requests: int = 300, num_tokens: int = 10**6
) -> Space:
    found = build_space(names, plan or planner(), num_requests=num_requests, num_tokens=num_tokens)
    assert found.points[0] == found.baseline
    assert len(set(found.points)) == len(found.points)
    return found


def values(space: Space, name: str) -> list[Value]:
    place = space.names.index(name)
    return sorted({point[place] for point in space.points})


def test_what_is_given_is_held_fixed_unless_named() -> None:
    assert choose_names(MODEL, ()) == ("page_size", "max_batch_tokens")
    assert choose_names(replace(MODEL, page_size=8), ()) == ("max_batch_tokens",)
    assert choose_names(replace(MODEL, page_size=8), ("page_size",)) == ("page_size", "max_batch_tokens")
    more = choose_names(MODEL, ("scheduler-type", "max_requests_per_batch"))
    assert more == ("page_size", "max_batch_tokens", "max_requests_per_batch", "scheduler_type")


def test_nothing_left_to_search_says_how_to() -> None:
    with pytest.raises(UsageError, match=r"nothing is left to search \(--search page_size"):
        choose_names(replace(MODEL, page_size=8, max_batch_tokens=64), ())


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(UsageError, match=r"--search must be one of page_size, .*: it is 'num_blocks'"):
        choose_names(MODEL, ("num_blocks",))


def test_the_default_is_there_even_off_the_grid() -> None:
    space = space_of("page_size", plan=planner(Plan(page_size=24)))
    assert space.baseline == (24,)
    assert values(space, "page_size") == [8, 16, 24, 32, 64, 128, 256]
    assert space.settings((24,)) == {}
    assert space.settings((32,)) == {"page_size": 32}


def test_pages_beyond_the_context_are_left_out() -> None:
    assert max(values(space_of("page_size", plan=planner(Plan(max_model_len=100))), "page_size")) == 64


def test_what_does_not_fit_is_not_proposed() -> None:
    def check(plan: Plan) -> None:
        if plan.max_batch_tokens * plan.page_size > 512 * 64:
            raise DoesNotFitError("no memory is left for the KV cache")

    space = space_of("page_size", "max_batch_tokens", plan=planner(check=check))
    assert all(int(page) * int(tokens) <= 512 * 64 for page, tokens in space.points)
    assert len(space.points) > 10


def test_a_cache_in_which_rows_could_fail_that_the_default_runs_is_left_out() -> None:
    """A fixed number of blocks makes small pages a small cache."""
    fixed = Plan(num_blocks=100, max_model_len=1600)

    def plan(settings: Mapping[str, Value]) -> Plan:
        return replace(planner(fixed)(settings), num_blocks=100)

    assert values(space_of("page_size", plan=plan), "page_size") == [16, 32, 64, 128, 256]


def test_steps_larger_than_the_sample_are_one_and_the_same() -> None:
    assert max(values(space_of("max_batch_tokens", num_requests=300, num_tokens=900), "max_batch_tokens")) == 2048


def test_steps_that_would_make_batches_smaller_need_rows_to_show_it() -> None:
    """The plan takes no more requests than tokens: with 64 tokens half a batch of 128 is gone, unseen."""
    assert min(values(space_of("max_batch_tokens", num_requests=60), "max_batch_tokens")) == 128
    assert min(values(space_of("max_batch_tokens", num_requests=128), "max_batch_tokens")) == 32


def test_a_limit_on_requests_is_searched_as_far_as_the_sample_fills_it_twice() -> None:
    space = space_of("max_requests_per_batch", num_requests=70)
    assert values(space, "max_requests_per_batch") == [1, 2, 4, 8, 16, 32, 128]


def test_a_value_that_the_plan_does_not_take_is_no_configuration() -> None:
    """Sharing where the model cannot; more requests than tokens."""
    space = space_of("max_batch_tokens", "max_requests_per_batch")
    assert all(int(tokens) >= int(requests) for tokens, requests in space.points)

    def plan(settings: Mapping[str, Value]) -> Plan:
        return replace(planner()(settings), allow_block_sharing=False)

    assert space_of("allow_block_sharing", plan=plan).points == ((False,),)


def test_places_are_those_among_the_choices() -> None:
    space = space_of("page_size", "scheduler_type")
    assert space.indices((8, "fifo")) == (0, 0)
    assert space.indices((256, "prefill_first")) == (5, 1)
    assert [knob.is_ordered for knob in space.knobs] == [True, False]
