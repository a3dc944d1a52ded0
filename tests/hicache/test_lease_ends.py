"""Every way out of a lease gives everything back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hicache.lease import Lease

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


def begun(rig: Rig, tokens: Tokens, steps: int) -> Lease:
    """A lease after so many steps."""
    lease = rig.cache.match(tokens, session="chat")
    if steps > 0:
        lease.load()
    if steps > 1:
        lease.reserve(len(tokens) - lease.reused)
        rig.write(lease, tokens, lease.reused, len(tokens))
    if steps > 2:
        lease.checkpoint(len(tokens))
    return lease


STEPS = pytest.mark.parametrize("steps", range(4), ids=["match", "load", "reserve", "checkpoint"])


@STEPS
def test_an_exception_in_the_block_gives_everything_back(
    make_rig: MakeRig, t: T, model: str, steps: int
) -> None:
    rig = make_rig(model, host=64)
    rig.serve(t(12))
    if model != "mamba":
        rig.squeeze()
    with pytest.raises(ZeroDivisionError), begun(rig, t(20), steps):
        raise ZeroDivisionError
    rig.check_idle()
    view = rig.cache.sessions.get("chat")
    assert view is not None
    assert view.open_leases == 0
    assert rig.cache.stats().requests == (3 if model != "mamba" else 2)


@STEPS
def test_leaving_the_block_after_a_release_changes_nothing(make_rig: MakeRig, t: T, steps: int) -> None:
    rig = make_rig(EVERY)
    with begun(rig, t(20), steps) as lease:
        lease.release(t(20) if steps > 1 else None)
        before = rig.cache.stats()
    assert rig.cache.stats() == before
    rig.check_idle()


@STEPS
def test_leaving_the_block_after_a_reset_is_quiet(make_rig: MakeRig, t: T, steps: int) -> None:
    rig = make_rig(EVERY, host=64)
    rig.serve(t(12))
    with begun(rig, t(20), steps):
        rig.cache.reset()
    rig.check_idle()
    assert rig.free() == 64
    assert len(rig.cache.sessions) == 0


@STEPS
def test_leaving_the_block_after_close_is_quiet(make_rig: MakeRig, t: T, steps: int) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(12))
    with begun(rig, t(20), steps):
        rig.cache.close()


def test_abandon_may_be_called_again_and_by_another_thread(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()
    lease = rig.cache.match(t(8))
    thread = threading.Thread(target=lease.abandon)
    thread.start()
    thread.join()
    lease.abandon()
    assert rig.cache.stats().requests == 1
    rig.check_idle()


def test_an_exit_during_a_load_leaves_the_slots_to_the_copy_until_it_ends(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, stepped=True)
    rig.serve_stepped(t(24))
    rig.squeeze_stepped()
    lease = rig.cache.match(t(25))
    lease._restore._begin_load()
    assert rig.to_device.num_pending > 0
    lease.abandon()
    rig.check()
    assert rig.cache.stats().pools["full", "device"].in_flight == 6
    rig.step_all()
    rig.check_idle()
