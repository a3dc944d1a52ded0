"""The room that a lease reserves: given for every component or for none, and refused by its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.errors import CapacityError

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]


def test_a_reservation_that_cannot_be_met_names_its_numbers_and_keeps_what_was_there(
    make_rig: MakeRig, t: T
) -> None:
    rig = make_rig(device=8)
    with rig.cache.match(t(40)) as lease:
        lease.reserve(16)
        with pytest.raises(CapacityError, match="4 of full") as caught:
            lease.reserve(32)
        assert (caught.value.required_slots, caught.value.free_slots) == (8, 4)
        rig.check()
        lease.reserve(16)
        assert len(lease.slots("full")) == 8
    assert rig.cache.stats().faults == {"reserve_refused": 1}
    rig.check_idle()


@pytest.mark.parametrize("count", [33, 2**31 - 1, 2**31, 2**70])
def test_more_tokens_than_l1_has_in_all_are_refused_by_their_number_and_displace_nothing(
    make_rig: MakeRig, t: T, count: int
) -> None:
    rig = make_rig("full+swa", device=8)
    rig.serve(t(16))
    with rig.cache.match(t(20, 101)) as lease:
        with pytest.raises(
            CapacityError, match=rf"cannot reserve {count} tokens: L1 takes 32 of .*tiers\.device\.capacity"
        ) as caught:
            lease.reserve(count)
        assert caught.value.required_slots == -(-count // 4)
    assert rig.serve(t(17)).source.total == 16
    assert rig.cache.stats().faults == {"reserve_refused": 1}
    rig.check_idle()


def test_a_prompt_that_never_fits_with_its_mark_names_the_pool_and_displaces_nothing(
    make_rig: MakeRig, t: T
) -> None:
    rig = make_rig("full+mamba", device=8)
    rig.serve(t(16))
    with rig.cache.match(t(140, 101)) as lease:
        with pytest.raises(CapacityError, match=r"full has 8 in all.*tiers\.device\.capacity") as caught:
            lease.reserve(4)
        assert caught.value.required_slots == 10
    assert rig.serve(t(17)).source.total == 16
    rig.check_idle()


def test_a_request_too_large_for_the_pool_hears_so_though_it_holds_a_part(make_rig: MakeRig, t: T) -> None:
    """Nobody else has anything, so releasing leases would not help."""
    rig = make_rig(device=8)
    with rig.cache.match(t(40)) as lease:
        lease.reserve(20)
        with pytest.raises(
            CapacityError, match=r"8 in all, and this request wants 5 beside the 5 that it holds"
        ):
            lease.reserve(20)
    rig.check_idle()


def test_other_requests_room_comes_back_when_they_end(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=8)
    first = rig.cache.match(t(20))
    first.reserve(20)
    with rig.cache.match(t(40, 21)) as second:
        with pytest.raises(CapacityError):
            second.reserve(20)
        first.abandon()
        second.reserve(20)
    rig.check_idle()


def test_all_components_get_their_slots_or_none_does(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+mamba", device={"full": 16, "mamba": 2})
    first, second, third = (rig.cache.match(t(4, start)) for start in (1, 2, 3))
    first.reserve(4)
    second.reserve(4)
    with pytest.raises(CapacityError, match="1 of mamba"):
        third.reserve(4)
    assert rig.free("full") == 14
    for lease in (first, second, third):
        lease.abandon()
    rig.check_idle()


@pytest.mark.parametrize(
    "count", [8, np.int64(8), np.uint16(8), True], ids=["int", "int64", "uint16", "bool"]
)
def test_any_integer_may_be_reserved(make_rig: MakeRig, t: T, count: Any) -> None:
    rig = make_rig()
    with rig.cache.match(t(20)) as lease:
        lease.reserve(count)
        assert len(lease.slots("full")) == (2 if count > 1 else 1)


@pytest.mark.parametrize("count", [-1, 2.0, 2.5, "8", None, np.float32(4)], ids=repr)
def test_what_is_no_count_of_tokens_cannot_be_reserved(make_rig: MakeRig, t: T, count: Any) -> None:
    rig = make_rig()
    with rig.cache.match(t(20)) as lease:
        with pytest.raises(ValueError, match="cannot reserve"):
            lease.reserve(count)
        rig.check()
    rig.check_idle()
