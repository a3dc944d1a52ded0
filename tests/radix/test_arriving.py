"""A lease that is settled on loads which have not ended: what it may do, and what becomes of it when they end."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import ProtocolError
from hicache.radix.actions import Copy
from hicache.radix.interface import TreeCore
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import NO_SLOT, LeaseId, TicketId, Tier

DEVICE = Tier.DEVICE


def in_host(build: BuildHarness, model: str = "full", *, device: int = 16) -> Harness:
    """A core that has T(16) in L2 alone, four pages."""
    cache = build(model, page_size=4, device=device, host=16)
    cache.serve(count_to(16), marks=[])
    for component in reversed(model.split("+")):
        cache.empty(component, DEVICE)
    cache.is_checked = False
    return cache


def begin(core: TreeCore, length: int = 17) -> tuple[LeaseId, list[Copy]]:
    """A lease settled on what its load brings, and the copies."""
    lease = core.match(np.arange(1, length + 1, dtype=np.int32)).lease
    copies = [action for action in core.load(lease).actions if isinstance(action, Copy)]
    assert core.settle(lease, arriving=True).boundary == 16
    return lease, copies


def owned(core: TreeCore) -> int:
    return core.pool_count("full", DEVICE).lease_owned


def test_the_slots_are_those_that_the_load_fills(build: BuildHarness) -> None:
    core = in_host(build).core
    lease, (copy,) = begin(core)
    assert core.lease_slots(lease, "full").tolist() == copy.target_slots.tolist()
    core.commit(copy.ticket)
    assert core.lease_slots(lease, "full").tolist() == copy.target_slots.tolist()
    assert core.settle(lease).boundary == 16
    assert core.audit() == []


def test_without_saying_so_only_what_is_there_counts(build: BuildHarness) -> None:
    core = in_host(build).core
    lease = core.match(np.arange(1, 18, dtype=np.int32)).lease
    core.load(lease)
    assert core.settle(lease).boundary == 0


def test_a_state_has_to_be_there_and_a_window_may_arrive(build: BuildHarness) -> None:
    core = in_host(build, "full+swa+mamba").core
    lease = core.match(np.arange(1, 18, dtype=np.int32)).lease
    copies = {action.component: action for action in core.load(lease).actions if isinstance(action, Copy)}
    assert core.settle(lease, arriving=True).boundary == 0
    core.release(lease)
    for copy in copies.values():
        core.abort(copy.ticket)
    lease = core.match(np.arange(1, 18, dtype=np.int32)).lease
    copies = {action.component: action for action in core.load(lease).actions if isinstance(action, Copy)}
    core.commit(copies["full"].ticket)  # what a state hangs on
    core.commit(copies["mamba"].ticket)
    assert core.settle(lease, arriving=True).boundary == 16
    window = core.lease_slots(lease, "swa")
    assert window[window != NO_SLOT].tolist() == copies["swa"].target_slots.tolist()
    assert core.audit() == []


def test_it_publishes_only_when_its_loads_have_ended(build: BuildHarness) -> None:
    core = in_host(build).core
    lease, (copy,) = begin(core, 24)
    assert not core.reserve(lease, 8).short
    tokens = np.arange(1, 25, dtype=np.int32)
    with pytest.raises(ProtocolError, match=r"still loads \(1 transfers\)"):
        core.insert(lease, tokens)
    with pytest.raises(ProtocolError, match=r"still loads \(1 transfers\)"):
        core.release(lease, tokens)
    core.commit(copy.ticket)
    assert core.insert(lease, tokens).published == 24
    assert core.audit() == []


@pytest.mark.parametrize("done_slots", [0, 3])
def test_a_load_that_fails_leaves_it_nothing_from_its_next_call_on(
    build: BuildHarness, done_slots: int
) -> None:
    core = in_host(build).core
    lease, (copy,) = begin(core, 24)
    core.reserve(lease, 8)
    core.abort(copy.ticket, done_slots)
    assert owned(core) == 2, "it may still be writing there"
    assert core.settle(lease).boundary == 0
    assert owned(core) == 0
    assert core.audit() == []
    assert not core.reserve(lease, 24).short
    assert core.insert(lease, np.arange(1, 25, dtype=np.int32)).published == 24
    core.release(lease)
    assert core.audit() == []


def test_another_load_that_fails_later_is_nothing_to_a_lease_that_began_anew(build: BuildHarness) -> None:
    core = in_host(build, "full+swa").core
    lease = core.match(np.arange(1, 18, dtype=np.int32)).lease
    copies = [action for action in core.load(lease).actions if isinstance(action, Copy)]
    core.settle(lease, arriving=True)
    core.abort(copies[0].ticket)
    assert core.settle(lease).boundary == 0
    core.reserve(lease, 16)
    core.abort(copies[1].ticket)
    assert core.settle(lease).boundary == 0
    assert owned(core) == 4, "what it reserved for its new beginning"
    assert core.audit() == []


def test_a_release_in_the_middle_leaves_the_slots_to_the_load(build: BuildHarness) -> None:
    core = in_host(build).core
    lease, (copy,) = begin(core)
    core.release(lease)
    assert core.pool_count("full", DEVICE).in_flight == 4
    core.commit(copy.ticket)
    assert core.pool_count("full", DEVICE).evictable == 4
    assert core.audit() == []


def test_a_split_in_the_middle_changes_no_slot(build: BuildHarness) -> None:
    core = in_host(build).core
    lease, (copy,) = begin(core)
    other = core.match(np.array([*range(1, 9), 99, 98], dtype=np.int32)).lease
    assert core.lease_slots(lease, "full").tolist() == copy.target_slots.tolist()
    core.commit(copy.ticket)
    assert core.lease_slots(lease, "full").tolist() == copy.target_slots.tolist()
    core.release(other)
    core.release(lease)
    assert core.audit() == []


def test_slots_that_another_insert_made_doubles_stay_until_their_readers_end(build: BuildHarness) -> None:
    """Two requests count on one load, a third one publishes the same pages: the load's slots are the two's alone."""
    core = in_host(build).core
    tokens = np.arange(1, 18, dtype=np.int32)
    third = core.match(tokens).lease
    core.reserve(third, 16)
    first, (copy,) = begin(core)
    second = core.match(tokens).lease
    assert core.load(second).tickets == (copy.ticket,)
    core.settle(second, arriving=True)
    core.insert(third, tokens[:16])
    core.commit(copy.ticket)
    assert owned(core) == 4
    core.release(first)
    assert owned(core) == 4
    core.release(second)
    assert owned(core) == 0
    core.release(third)
    assert core.audit() == []
    assert core.pool_count("full", DEVICE).free == 12


def test_a_reset_forgets_all_of_it(build: BuildHarness) -> None:
    core = in_host(build).core
    lease, (copy,) = begin(core)
    core.reset()
    assert core.commit(TicketId(copy.ticket)) == ()
    with pytest.raises(ProtocolError, match="reset"):
        core.settle(lease)
    assert core.pool_count("full", DEVICE).free == 16
    assert core.audit() == []
