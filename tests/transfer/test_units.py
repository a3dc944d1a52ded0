"""Copies between slots of L1 or staging and the units of a shared L2."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.tiers.device import DevicePool
from hicache.tiers.shared_host import SharedHostPool
from hicache.transfer.copy import PageCopier, check_pairs
from hicache.transfer.layout import Layout, PlacedView, UnitView
from hicache.transfer.staging import page_views, staged
from hicache.types import ComponentSpec, ReuseRule, Tier

SHAPES = [
    pytest.param(1, 24, 8, id="one-layer"),
    pytest.param(3, 5, 8, id="odd-bytes"),
    pytest.param(4, 1024, 1000, id="small-units"),
    pytest.param(36, 8 << 10, 80 << 10, id="many-layers-in-a-unit"),
    pytest.param(3, 40 << 10, 32 << 10, id="a-layer-over-two-units"),
    pytest.param(2, (300 << 10) + 8, 200 << 10, id="layers-above-a-piece"),
    pytest.param(2, 64 << 10, 128 << 10, id="a-whole-unit"),
]


class Sides:
    """L1 and a shared L2 of one component, whose slots have scattered units."""

    def __init__(self, num_layers: int, layer_bytes: int, unit_bytes: int, num_slots: int = 6) -> None:
        self.size = num_layers * layer_bytes
        spec = ComponentSpec("mamba", ReuseRule.CHECKPOINT, num_layers=num_layers, state_bytes=self.size)
        cost = -(-self.size // unit_bytes)
        self.device = DevicePool((spec,), 1, {"mamba": num_slots})
        self.host = SharedHostPool(
            (spec,), 1, num_units=num_slots * cost, unit_bytes=unit_bytes, costs={"mamba": cost}, pinned=False
        )
        placement = self.host.placement
        placement._stack[:] = np.random.default_rng(self.size).permutation(placement.num_units)
        layout = Layout((spec,), 1, device=self.device, host=self.host)
        self.l1, self.l2 = layout.view("mamba", Tier.DEVICE), layout.view("mamba", Tier.HOST)
        self.num_slots = num_slots
        self.pages = np.random.default_rng(7).integers(0, 256, (num_slots, self.size), dtype=np.uint8)

    def scattered(self) -> np.ndarray:
        """Places of all slots in L2."""
        return self.l2.place(np.arange(self.num_slots))


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize(("num_layers", "layer_bytes", "unit_bytes"), SHAPES)
def test_slots_go_down_and_come_up_whole(
    num_layers: int, layer_bytes: int, unit_bytes: int, num_lanes: int
) -> None:
    sides = Sides(num_layers, layer_bytes, unit_bytes)
    sides.device.write_many("mamba", range(6), sides.pages)
    places, order = sides.scattered(), np.array([3, 0, 5, 1])
    with PageCopier(num_lanes) as copier:
        copier.copy(sides.l1, np.arange(4), sides.l2, places[order])
        assert (sides.host.read_many("mamba", order) == sides.pages[:4]).all()
        assert not sides.host.read_many("mamba", [2, 4]).any(), "slots that were not named were written"
        copier.copy(sides.l2, places[order[::-1]], sides.l1, np.array([5, 4, 3, 2]))
    expected = sides.pages[[0, 1, 0, 1, 2, 3]]
    assert (sides.device.read_many("mamba", range(6)) == expected).all()


@pytest.mark.parametrize(("num_layers", "layer_bytes", "unit_bytes"), SHAPES)
def test_a_page_is_one_run_of_bytes_for_a_store(num_layers: int, layer_bytes: int, unit_bytes: int) -> None:
    sides = Sides(num_layers, layer_bytes, unit_bytes)
    places = sides.scattered()
    for slot, page in enumerate(sides.pages):
        sides.host.write("mamba", slot, page.tobytes())
    into = staged(torch.zeros(6 * sides.size + 64, dtype=torch.uint8), 0, 6, sides.l2)
    with PageCopier() as copier:
        copier.copy(sides.l2, places, into, np.arange(6))
        assert [bytes(view) for view in page_views(into)] == [page.tobytes() for page in sides.pages]
        copier.copy(into, np.arange(6)[::-1].copy(), sides.l2, places)
    assert (sides.host.read_many("mamba", range(6)) == sides.pages[::-1]).all()


def test_a_slot_that_is_one_whole_unit_is_copied_as_any_other() -> None:
    assert isinstance(Sides(2, 64, 128).l2, PlacedView)
    assert not isinstance(Sides(2, 64, 64).l2, PlacedView)


def test_both_sides_of_a_copy_have_slots_of_one_shape() -> None:
    sides, other = Sides(2, 64, 48), Sides(4, 32, 48)
    assert isinstance(sides.l2, UnitView)
    check_pairs(sides.l1, np.arange(2), sides.l2, np.arange(2))
    with pytest.raises(Exception, match="differ in shape"):
        check_pairs(sides.l1, np.arange(2), other.l2, np.arange(2))
    with pytest.raises(Exception, match="do not lie in a pool of 6"):
        check_pairs(sides.l1, np.array([1]), sides.l2, np.array([6]))


@settings(max_examples=60, deadline=None)
@given(
    num_layers=st.integers(1, 5),
    layer_bytes=st.sampled_from([1, 8, 72, 9000, 48 << 10]),
    units=st.fractions(min_value="1/7", max_value=2, max_denominator=7),
)
def test_any_shape_equals_slot_by_slot(num_layers: int, layer_bytes: int, units: Fraction) -> None:
    unit_bytes = 8 * max(1, int(num_layers * layer_bytes * units) // 8)
    sides = Sides(num_layers, layer_bytes, unit_bytes, num_slots=3)
    sides.device.write_many("mamba", range(3), sides.pages)
    with PageCopier(num_lanes=2) as copier:
        copier.copy(sides.l1, np.arange(3), sides.l2, sides.scattered())
    assert (sides.host.read_many("mamba", range(3)) == sides.pages).all()
