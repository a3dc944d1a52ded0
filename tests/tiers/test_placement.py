from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import CapacityError, ProtocolError
from hicache.tiers.placement import Placement
from hicache.tiers.shared_host import SharedHostPool
from hicache.types import ComponentSpec, ReuseRule

COSTS = {"full": 1, "swa": 2, "mamba": 5}


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_what_one_component_gives_up_any_other_can_have_without_lying_together() -> None:
    placement = Placement(10, COSTS)
    placement.place("full", np.arange(10))
    placement.release("full", slots(0, 2, 4, 6, 8))
    units = placement.place("mamba", slots(1))
    assert sorted(units[0].tolist()) == [0, 2, 4, 6, 8]
    assert placement.num_free == 0
    assert placement.check_integrity() == []


def test_slots_of_a_fresh_pool_lie_one_after_the_other() -> None:
    placement = Placement(12, COSTS)
    assert placement.place("mamba", slots(0, 1)).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    placement.release("mamba", slots(0))
    assert placement.place("full", slots(7, 3)).tolist() == [[0], [1]]


def test_a_refused_call_changes_nothing() -> None:
    placement = Placement(6, COSTS)
    placement.place("mamba", slots(0))
    with pytest.raises(CapacityError, match="1 slots of 2 units asked, 1 units are free"):
        placement.place("swa", slots(0))
    with pytest.raises(ProtocolError, match="slot 0 has a place in L2 already"):
        placement.place("mamba", slots(0))
    with pytest.raises(ProtocolError, match="slot 1 has no place"):
        placement.release("full", slots(1))
    with pytest.raises(ProtocolError, match="slot 2 has no place"):
        placement.units("full", slots(2))
    assert (placement.num_free, placement.num_placed("mamba"), placement.num_placed("swa")) == (1, 1, 0)
    assert placement.check_integrity() == []


def test_withheld_units_are_the_highest_free_ones_and_come_back() -> None:
    placement = Placement(8, COSTS)
    placement.place("swa", slots(0))
    assert placement.withhold(3).tolist() == [5, 6, 7]
    assert placement.withhold(2).tolist() == []
    assert (placement.num_withheld, placement.num_free) == (2, 4)
    placement.clear()
    assert (placement.num_withheld, placement.num_free) == (2, 6)
    assert placement.withhold(99).tolist() == [0, 1, 2, 3, 4, 7]
    assert placement.check_integrity() == []


def test_a_unit_that_two_slots_have_is_found() -> None:
    placement = Placement(4, COSTS)
    placement.place("full", slots(0, 1))
    placement._places["full"][1] = placement._places["full"][0]
    assert placement.check_integrity() == [
        "L2: unit 0 is had 2 times, not once",
        "L2: unit 1 is had 0 times, not once",
    ]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_units=st.integers(5, 40))
def test_any_sequence_of_calls_gives_each_unit_to_one_slot_at_most(
    data: st.DataObject, num_units: int
) -> None:
    placement = Placement(num_units, COSTS)
    held: dict[tuple[str, int], list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25), label="calls")):
        name = data.draw(st.sampled_from(sorted(COSTS)), label="component")
        mine = [slot for owner, slot in held if owner == name]
        if data.draw(st.booleans(), label="place"):
            others = [slot for slot in range(placement.num_slots(name)) if slot not in mine]
            most = min(len(others), placement.num_free // COSTS[name])
            chosen = data.draw(st.permutations(others), label="slots")[: data.draw(st.integers(0, most))]
            units = placement.place(name, slots(*chosen))
            held |= {(name, slot): row for slot, row in zip(chosen, units.tolist(), strict=True)}
        elif data.draw(st.integers(0, 3), label="act"):
            chosen = data.draw(st.permutations(mine), label="slots")[: data.draw(st.integers(0, len(mine)))]
            placement.release(name, slots(*chosen))
            for slot in chosen:
                del held[name, slot]
        else:
            placement.withhold(data.draw(st.integers(0, num_units), label="withheld"))
        every = [unit for row in held.values() for unit in row]
        assert len(set(every)) == len(every)
        assert placement.num_free + placement.num_withheld + len(every) == num_units
        assert placement.check_integrity() == []
    for (name, slot), row in held.items():
        assert placement.units(name, slots(slot)).tolist() == [row]


# ---- the pool ------------------------------------------------------------------------------------------------------
SPECS = (
    ComponentSpec("full", num_layers=2, bytes_per_token=4),
    ComponentSpec("mamba", ReuseRule.CHECKPOINT, num_layers=3, state_bytes=60),
)


def make_pool(num_units: int = 8) -> SharedHostPool:
    return SharedHostPool(
        SPECS, 4, num_units=num_units, unit_bytes=16, costs={"full": 1, "mamba": 4}, pinned=False
    )


def test_bytes_come_back_from_whatever_units_a_slot_has() -> None:
    pool = make_pool()
    pool.placement.place("full", np.arange(8))
    for slot in range(8):
        pool.write("full", slot, bytes([slot]) * 16)
    pool.placement.release("full", slots(1, 3, 4, 6))
    pool.placement.place("mamba", slots(1))
    state = bytes(range(60))
    pool.write("mamba", 1, state)
    assert pool.read("mamba", 1) == state
    assert [pool.read("full", slot)[0] for slot in (0, 2, 5, 7)] == [0, 2, 5, 7]


def test_a_slot_without_a_place_and_a_wrong_length_are_refused() -> None:
    pool = make_pool()
    with pytest.raises(ProtocolError, match="slot 0 has no place"):
        pool.read("full", 0)
    with pytest.raises(ValueError, match="59 bytes, 60 expected"):
        pool.write("mamba", 0, b"x" * 59)
    pool.close()
    with pytest.raises(ProtocolError, match="closed"):
        _ = pool.units
    assert pool.nbytes == 0


def test_withheld_memory_goes_back_to_the_system() -> None:
    specs = (ComponentSpec("full", bytes_per_token=4096), ComponentSpec("swa", bytes_per_token=8192))
    pool = SharedHostPool(specs, 1, num_units=64, unit_bytes=4096, costs={"full": 1, "swa": 2}, pinned=False)
    pool.units[:] = 1
    freed = pool.withhold(32)
    assert 31 * 4096 <= freed <= 32 * 4096
    assert int(pool.units[:32].min()) == 1
    assert int(pool.units[33:63].max()) == 0
