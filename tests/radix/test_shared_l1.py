"""L1 as one budget for all components: one reservation asks for all, and memory follows what is in use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.errors import ConfigError
from hicache.radix.core import make_core
from hicache.testing.harness import Harness
from hicache.testing.trees import count_to, tree_config
from hicache.types import Tier

DEVICE = Tier.DEVICE


def make(
    core_kind: str,
    units: int,
    *,
    model: str = "full+mamba",
    page: int = 1,
    state: int = 4,
    **keywords: object,
) -> Harness:
    costs = {"full": page, "mamba": state, "swa": page}
    config = tree_config(
        model,
        device=units,
        device_costs={name: costs[name] for name in model.split("+")},
        **keywords,  # type: ignore[arg-type]  # by test
    )
    return Harness(make_core(config, kind=core_kind))


def num_held(cache: Harness) -> dict[str, int]:
    return {spec.name: cache.core.held_slots(spec.name, DEVICE) for spec in cache.core.config.components}


def test_each_component_could_have_all_of_it(core_kind: str) -> None:
    cache = make(core_kind, 30)
    assert cache.core.free_slots("full", DEVICE) == (30, 30)
    assert cache.core.free_slots("mamba", DEVICE) == (7, 7)
    cache.serve(count_to(20), marks=())
    assert num_held(cache) == {"full": 20, "mamba": 1}
    assert cache.core.free_slots("full", DEVICE) == (30, 6)
    assert cache.core.free_slots("mamba", DEVICE) == (7, 1)
    count = cache.core.pool_count("full", DEVICE)
    assert (count.evictable, count.others, count.free) == (20, 4, 6)


def test_long_prompts_take_the_room_of_states_and_short_ones_give_it_back(core_kind: str) -> None:
    """A fixed split serves one of the two loads."""
    cache = make(core_kind, 40)
    for first in range(100, 800, 100):
        cache.serve(count_to(first + 2, start=first), marks=())
    assert num_held(cache)["mamba"] >= 5  # conversations of three pages and a state
    cache.serve(count_to(30), marks=())
    assert num_held(cache)["full"] >= 30
    assert cache.probe([*count_to(30), 50]).boundary == 30


def test_a_reservation_has_room_for_all_components_together(core_kind: str) -> None:
    """Of 20 units 10 are free: enough for 8 pages or for a state, not for both."""
    cache = make(core_kind, 20)
    cache.serve(count_to(106, start=101), marks=())  # 6 pages and a state
    lease = cache.match(count_to(8))
    assert not cache.reserve(lease, 8).short
    assert len(lease.slots["full"]) == 8
    assert "mamba" in lease.states
    assert num_held(cache) == {"full": 6 + 8, "mamba": 1}  # the older state left


def test_what_lacks_is_told_in_slots_of_the_cheapest(core_kind: str) -> None:
    cache = make(core_kind, 20)
    holder = cache.match(count_to(10))
    assert not cache.reserve(holder, 10).short  # 10 pages and a state
    other = cache.match(count_to(205, start=201))
    assert cache.reserve(other, 5).short == {"full": 5 + 4 - 6}
    assert not cache.reserve(other, 2).short


def test_a_prompt_that_does_not_fit_with_its_state_displaces_nothing(core_kind: str) -> None:
    cache = make(core_kind, 20)
    cache.serve(count_to(103, start=101), marks=())
    fits = cache.match(count_to(12))
    too_long = cache.match(count_to(13))  # with its own state and the one that it leaves
    assert cache.reserve(too_long, 1).short == {"full": 13 + 8 - (20 - 3 - 4)}
    assert num_held(cache) == {"full": 3, "mamba": 1}
    cache.release(too_long, 0)
    assert not cache.reserve(fits, 12).short
    assert num_held(cache)["full"] >= 12


@pytest.mark.parametrize(("model", "most"), [("full+mamba", 60 - 4), ("full+swa", 30)])
@pytest.mark.parametrize("first", [0, 20])
def test_a_reservation_that_even_an_empty_l1_cannot_meet_displaces_nothing(
    core_kind: str, model: str, most: int, first: int
) -> None:
    cache = make(core_kind, 60, model=model)
    cache.serve(count_to(103, start=101), marks=())
    lease = cache.match(count_to(4))
    assert not cache.reserve(lease, first).short
    held = num_held(cache)
    refused = cache.reserve(lease, most + 1 - first)
    assert refused.short
    assert refused.tickets == ()
    assert num_held(cache) == held
    assert cache.probe(count_to(104, start=101)).boundary == 3
    assert not cache.reserve(lease, most - first).short
    assert cache.probe(count_to(104, start=101)).boundary == 0


def test_what_a_request_published_counts_as_its_own(core_kind: str) -> None:
    cache = make(core_kind, 60)
    cache.serve(count_to(103, start=101), marks=())
    lease = cache.match(count_to(20))
    assert not cache.reserve(lease, 20).short
    cache.compute(lease, 20)
    cache.insert(lease, 20)
    held = num_held(cache)
    assert cache.reserve(lease, 60 - 4 - 20 + 1).short
    assert num_held(cache) == held


def test_what_fits_exactly_is_not_refused_as_slots_are_rounded(core_kind: str) -> None:
    """Of 50 units pages take 3 and states 10, so that 16 pages leave 2 units over."""
    cache = make(core_kind, 50, page=3, state=10)
    cache.serve(count_to(103, start=101), marks=())
    lease = cache.match(count_to(10))  # with its own state and the one that it leaves
    assert not cache.reserve(lease, 10).short
    cache.compute(lease, 10)
    cache.release(lease, 10)
    assert cache.probe(count_to(11)).boundary == 10
    too_long = cache.match(count_to(211, start=201))
    assert cache.reserve(too_long, 1).short


def test_what_fits_exactly_beside_others_is_not_refused(core_kind: str) -> None:
    cache = make(core_kind, 26, page=3, state=10)
    for first in (100, 200):
        assert not cache.reserve(cache.match([first]), 1).short  # a page and a state
    assert cache.core.free_slots("full", DEVICE) == (8, 0)


def test_nothing_is_loaded_for_a_prompt_that_is_never_admitted(core_kind: str) -> None:
    cache = make(core_kind, 30, host=100)
    cache.serve(count_to(20), marks=())
    for first in (100, 200, 300, 400):
        cache.serve(count_to(first + 3, start=first), marks=())
    held = num_held(cache)
    lease = cache.match(count_to(23))
    assert lease.boundary == 20
    assert cache.load(lease).tickets == ()
    assert cache.settle(lease).boundary == 0
    assert cache.reserve(lease, 23).short
    assert num_held(cache) == held
    cache.release(lease)
    fits = cache.match(count_to(22))
    assert cache.load(fits).tickets


def test_memory_is_named_once_when_more_was_used_than_the_budget_holds(core_kind: str) -> None:
    """Pages first, then as many states as fit: what was pages has to go, and only that."""
    cache = make(core_kind, 24)
    cache.serve(count_to(16), marks=())
    assert num_held(cache) == {"full": 16, "mamba": 1}
    assert cache.core.surplus_slots() == {}
    for first in (100, 200, 300):
        cache.serve([first], marks=())
    held = num_held(cache)
    assert held["mamba"] == 3
    named = cache.core.surplus_slots()
    assert sorted(named) == ["full", "mamba"]
    assert len(named["full"]) >= 16 - held["full"] > 0
    tree = {slot for view in cache.core.snapshot() for slot in view.slots.get(("full", DEVICE), ())}
    assert not tree & set(named["full"].tolist())
    assert cache.core.surplus_slots() == {}


def test_memory_stays_as_long_as_shares_do_not_move(core_kind: str) -> None:
    cache = make(core_kind, 24)
    for first in range(100, 2000, 100):
        cache.serve(count_to(first + 4, start=first), marks=())
        assert cache.core.surplus_slots() == {}


def test_where_pools_are_fixed_nothing_is_named(core_kind: str) -> None:
    cache = Harness(make_core(tree_config("full+mamba", device={"full": 8, "mamba": 2}), kind=core_kind))
    for first in (100, 200, 300):
        cache.serve(count_to(first + 4, start=first), marks=())
    assert cache.core.surplus_slots() == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device_costs": {"full": 0, "mamba": 4}}, "device_costs: at least one unit a slot"),
        ({"device_slots": {"full": 12, "mamba": 4}}, "device_slots: 12 units hold"),
        ({"device_costs": {}}, "device_units: nothing shares them"),
    ],
)
def test_a_budget_that_does_not_add_up_is_refused(
    core_kind: str, changes: dict[str, dict[str, int]], problem: str
) -> None:
    config = tree_config("full+mamba", device=12, device_costs={"full": 1, "mamba": 4})
    with pytest.raises(ConfigError, match=problem):
        make_core(replace(config, **changes), kind=core_kind)  # type: ignore[arg-type]  # on purpose
