"""L2 as one budget for all components: whoever needs room takes it from what goes first, whose ever it is."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError, ProtocolError
from hicache.radix.core import make_core
from hicache.testing.harness import Harness
from hicache.testing.trees import count_to, tree_config
from hicache.types import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def make(core_kind: str, model: str, host: int, costs: dict[str, int], **keywords: object) -> Harness:
    config = tree_config(model, host=host, host_costs=costs, **keywords)  # type: ignore[arg-type]  # by test
    return Harness(make_core(config, kind=core_kind))


def free(cache: Harness, component: str) -> tuple[int, int]:
    return cache.core.free_slots(component, HOST)


def test_each_component_could_have_all_of_it(core_kind: str) -> None:
    cache = make(core_kind, "full+mamba", 10, {"full": 1, "mamba": 4})
    assert free(cache, "full") == (10, 10)
    assert free(cache, "mamba") == (2, 2)
    cache.serve(count_to(3), marks=())
    cache.complete_all()
    assert free(cache, "full") == (10, 3)  # three pages and a state
    assert free(cache, "mamba") == (2, 0)
    count = cache.core.pool_count("full", HOST)
    assert (count.evictable, count.others, count.free) == (3, 4, 3)
    assert cache.core.held_slots("mamba", HOST) == 1


def test_pages_take_the_room_of_states_that_are_older(core_kind: str) -> None:
    """A fixed split would keep all three states; here the oldest conversation goes, state and pages."""
    cache = make(core_kind, "full+mamba", 14, {"full": 1, "mamba": 4}, device={"full": 64, "mamba": 16})
    for start in (100, 200):
        cache.serve(count_to(start + 2, start=start), marks=())
    assert free(cache, "full") == (14, 0)
    cache.empty("full", DEVICE)
    cache.serve(count_to(302, start=300), marks=())
    cache.empty("full", DEVICE)
    assert (cache.core.held_slots("full", HOST), cache.core.held_slots("mamba", HOST)) == (6, 2)
    found = [cache.probe(count_to(start + 3, start=start)).boundary for start in (100, 200, 300)]
    assert found == [0, 3, 3]


@pytest.mark.parametrize("is_state_older", [True, False])
def test_the_lesser_of_the_queues_heads_goes_first(core_kind: str, is_state_older: bool) -> None:
    """An inner state ages by its own last use, whoever asks for the room."""
    cache = make(core_kind, "full+mamba", 30, {"full": 1, "mamba": 4}, device={"full": 64, "mamba": 16})
    cache.serve(count_to(4), marks=())
    cache.serve([*count_to(4), 50, 51], marks=())  # uses the state after 4, leaves one after 6
    cache.serve(count_to(203, start=200), marks=())
    if not is_state_older:
        cache.serve([*count_to(4), 60], marks=())
    cache.empty("full", DEVICE)
    cache.make_room("full", HOST, free(cache, "full")[1] + 1)
    states = [view for view in cache.core.snapshot() if ("mamba", HOST) in view.slots]
    ends = {view.start + len(view.tokens) for view in states if view.tokens[0] < 100}
    assert ends == ({6} if is_state_older else {4, 5})


@pytest.mark.parametrize("is_met_again", [True, False])
@pytest.mark.parametrize("model", ["full+mamba", "full+swa"])
def test_a_conversation_loses_its_tail_before_the_spare_marks_that_insure_it(
    core_kind: str, model: str, is_met_again: bool
) -> None:
    """Made by an earlier chunk or met by the match they are older than the end, but by a few operations only."""
    costs = dict.fromkeys(model.split("+"), 1)
    cache = make(core_kind, model, 40, costs, device=32, window=1, mark_spacing=4)
    cache.serve(count_to(12), marks=(4, 8))
    if is_met_again:
        cache.serve(count_to(14), marks=())
        cache.serve(count_to(14), marks=())
    cache.complete_all()
    for component in reversed(costs):
        cache.empty(component, DEVICE)
    boundaries = [cache.probe(count_to(20)).boundary]
    while boundaries[-1]:
        cache.make_room("full", HOST, free(cache, "full")[1] + 1)
        boundary = cache.probe(count_to(20)).boundary
        boundaries += [boundary] if boundary != boundaries[-1] else []
    assert boundaries[-3:] == [8, 4, 0]


def test_slots_of_every_size_come_out_of_one_number(core_kind: str) -> None:
    cache = make(core_kind, "full+swa", 12, {"full": 2, "swa": 1}, window=2)
    cache.serve(count_to(4), marks=())
    cache.complete_all()
    assert cache.core.held_slots("full", HOST) == 4
    assert cache.core.held_slots("swa", HOST) == 2
    assert free(cache, "swa") == (12, 2)
    assert free(cache, "full") == (6, 1)
    cache.serve(count_to(201, start=200), marks=())
    cache.complete_all()
    assert cache.core.held_slots("full", HOST) + cache.core.held_slots("swa", HOST) >= 6
    assert free(cache, "swa")[1] < 2


def test_room_counts_what_leaves_in_units_whoever_it_is(core_kind: str) -> None:
    """Under write_back victims travel to L3 first; their room is spoken for once, not asked for again."""
    cache = make(
        core_kind,
        "full+mamba",
        12,
        {"full": 1, "mamba": 4},
        device={"full": 64, "mamba": 16},
        has_store=True,
        write="write_back",
    )
    cache.serve(count_to(4), marks=())
    cache.empty("full", DEVICE)
    room = cache.make_room("full", HOST, 12)
    assert room.tickets
    cache.complete_all()
    while cache.make_room("full", HOST, 12).tickets:
        cache.complete_all()
    assert free(cache, "full") == (12, 12)
    assert cache.probe(count_to(5)).boundary == 4


def test_states_leave_the_room_that_their_path_needs_on_its_way_to_l3(core_kind: str) -> None:
    """Else an L2 full of states whose pages are in L1 alone could only be emptied by losing some."""
    cache = make(
        core_kind,
        "full+mamba",
        9,
        {"full": 1, "mamba": 4},
        device={"full": 8, "mamba": 8},
        has_store=True,
        write="write_back",
    )
    for start in (100, 200, 300):
        cache.serve(count_to(start + 1, start=start), marks=())
    for component in ("mamba", "full"):
        cache.empty(component, DEVICE)
    for _ in range(20):
        cache.persist_all()
    for start in (100, 200, 300):
        found = cache.probe(count_to(start + 2, start=start))
        assert found.boundary == 2, f"{start}: {found}"


def test_the_budget_is_resized_in_slots_of_any_component(core_kind: str) -> None:
    cache = make(core_kind, "full+mamba", 14, {"full": 1, "mamba": 4})
    cache.serve(count_to(3), marks=())
    cache.complete_all()
    cache.resize("full", HOST, 8)
    assert free(cache, "full") == (8, 1)
    cache.resize("mamba", HOST, 1)
    assert (free(cache, "full")[0], free(cache, "mamba")[0]) == (4, 1)
    cache.resize("full", HOST, 5)
    assert cache.core.withheld_slots("full", HOST).tolist() == []
    cache.reset()
    assert free(cache, "full") == (5, 5)
    cache.resize("full", HOST, 14)
    assert free(cache, "mamba") == (3, 3)
    with pytest.raises(ProtocolError, match="mamba in HOST: 4 slots asked, 1 to 3 can be had"):
        cache.core.resize("mamba", HOST, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_costs": {"full": 0, "mamba": 4}}, "at least one unit a slot"),
        ({"host_units": 11}, "11 units hold"),
        ({"host_costs": {}}, "nothing shares them"),
    ],
)
def test_a_budget_that_contradicts_itself_is_refused(
    core_kind: str, changes: dict[str, object], message: str
) -> None:
    import dataclasses

    config = tree_config("full+mamba", host=12, host_costs={"full": 1, "mamba": 4})
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match=message):
        make_core(config, kind=core_kind)


def test_room_for_a_window_is_not_taken_from_the_pages_it_hangs_on(core_kind: str) -> None:
    """The window of a page that leaves L1 finds L2 full of that page."""
    cache = make(core_kind, "full+swa", 1, {"full": 1, "swa": 1}, device=8, window=2)
    cache.serve(count_to(1), marks=())
    assert [cache.core.held_slots(name, HOST) for name in ("full", "swa")] == [1, 0]
    cache.empty("full", DEVICE)
    assert [cache.core.held_slots(name, HOST) for name in ("full", "swa")] == [1, 0]
