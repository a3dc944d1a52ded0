"""What a caller of a lease may not do is refused, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.errors import ProtocolError
from hicache.lease import Lease

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"

# ---- what a caller may not do ----------------------------------------------------------------------------------------
MISUSE: dict[str, tuple[Callable[[Lease], object], type[Exception]]] = {
    "release with a token of the prompt changed": (lambda lease: lease.release([1, 2, 3, 4, 5, 6, 7, 8, 9, 77]), ProtocolError),
    "release with a reused token changed": (lambda lease: lease.release([1, 77, *range(3, 21)]), ProtocolError),
    "release with fewer tokens than are published": (lambda lease: lease.release([1, 2, 3]), ProtocolError),
    "release more written than there are": (lambda lease: lease.release(np.arange(1, 21, dtype=np.int32), written=21), ProtocolError),
    "release with a negative count written": (lambda lease: lease.release(written=-1), ProtocolError),
    "release beyond what was reserved": (lambda lease: lease.release(np.arange(1, 41, dtype=np.int32)), ProtocolError),
    "release with bad tokens": (lambda lease: lease.release([1, 2, -3]), ValueError),
    "reserve a negative number": (lambda lease: lease.reserve(-1), ValueError),
    "checkpoint beyond what was reserved": (lambda lease: lease.checkpoint(40, np.arange(1, 41, dtype=np.int32)), ProtocolError),
    "checkpoint beyond the prompt without tokens": (lambda lease: lease.checkpoint(21), ProtocolError),
    "checkpoint below what is published": (lambda lease: lease.checkpoint(4), ProtocolError),
    "checkpoint of a negative length": (lambda lease: lease.checkpoint(-4), ProtocolError),
    "checkpoint with other tokens": (lambda lease: lease.checkpoint(12, [*range(1, 10), 77, 78, 79]), ProtocolError),
    "checkpoint of a fraction": (lambda lease: lease.checkpoint(12.5), ValueError),  # type: ignore[arg-type]
    "release with a fraction written": (lambda lease: lease.release(written=1.5), ValueError),  # type: ignore[arg-type]
    "release for a reason that is no text": (lambda lease: lease.release(stop=3), ValueError),  # type: ignore[arg-type]
    "the state of a component that has none": (lambda lease: lease.state("full"), ProtocolError),
    "the slots of a component that keeps states": (lambda lease: lease.slots("mamba"), ProtocolError),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_and_changes_nothing(make_rig: MakeRig, t: T, name: str) -> None:
    misuse, error = MISUSE[name]
    rig = make_rig(EVERY)
    rig.serve(t(8))
    with rig.cache.match(t(20)) as lease:
        assert lease.load() == 8
        lease.reserve(12)
        rig.write(lease, t(20), 8, 20)
        before = rig.cache.stats()
        with pytest.raises(error):
            misuse(lease)
        assert rig.cache.stats() == before
        rig.check()
        lease.release(t(20))
    rig.check_idle()
    assert rig.serve(t(21)).source.device == 20


AFTER: dict[str, Callable[[Lease], Any]] = {
    "load": lambda lease: lease.load(),
    "plan": lambda lease: lease.plan(),
    "reserve": lambda lease: lease.reserve(1),
    "slots": lambda lease: lease.slots("full"),
    "state": lambda lease: lease.state("mamba"),
    "checkpoint": lambda lease: lease.checkpoint(4),
    "wait_layer": lambda lease: lease.wait_layer(0),
    "release": lambda lease: lease.release([1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_released_lease_is_of_no_use_any_more(make_rig: MakeRig, t: T, name: str) -> None:
    rig = make_rig(EVERY)
    lease = rig.cache.match(t(8))
    lease.release()
    with pytest.raises(ProtocolError, match="released already"):
        AFTER[name](lease)
    rig.check_idle()


@pytest.mark.parametrize("name", sorted(AFTER.keys() - {"wait_layer"}))
def test_a_lease_from_before_a_reset_is_refused(make_rig: MakeRig, t: T, name: str) -> None:
    rig = make_rig(EVERY)
    old = rig.cache.match(t(8))
    rig.cache.reset()
    new = rig.cache.match(t(8))
    with pytest.raises(ProtocolError, match="reset"):
        AFTER[name](old)
    rig.check()
    assert new.load() == 0
    new.release()
    old.abandon()
    rig.check_idle()


def test_a_loaded_lease_from_before_a_reset_has_nothing_to_reuse(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY)
    rig.serve(t(8))
    old = rig.cache.match(t(20))
    assert old.load() == 8
    rig.cache.reset()
    with pytest.raises(ProtocolError, match="reset"):
        old.load()
    old.abandon()


@pytest.mark.parametrize("name", ["flush", "drain"])
def test_a_closed_cache_claims_to_have_written_nothing(make_rig: MakeRig, t: T, name: str) -> None:
    rig = make_rig(host=64, store="scripted")
    rig.serve(t(8))
    rig.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        getattr(rig.cache, name)()


@pytest.mark.parametrize("name", sorted(AFTER))
def test_a_lease_of_a_closed_cache_is_refused(make_rig: MakeRig, t: T, name: str) -> None:
    rig = make_rig(EVERY)
    lease = rig.cache.match(t(8))
    rig.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        AFTER[name](lease)


def test_a_state_is_asked_for_after_load_or_reserve(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+mamba")
    with rig.cache.match(t(8)) as lease:
        with pytest.raises(ProtocolError, match="call reserve first"):
            lease.state("mamba")
        lease.reserve(8)
        assert 0 <= lease.state("mamba") < 64


# ---- what is asked of the wrong component, or of none ----------------------------------------------------------------


def test_slots_of_a_state_and_the_state_of_pages_name_the_call_that_is_meant(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY)
    with rig.cache.match(t(12)) as lease:
        lease.reserve(12)
        with pytest.raises(
            ProtocolError, match=re.escape("mamba keeps states, not pages; call state('mamba')")
        ):
            lease.slots("mamba")
        for name in ("full", "swa"):
            with pytest.raises(
                ProtocolError, match=re.escape(f"keeps pages, not a state; call slots('{name}')")
            ):
                lease.state(name)
        for ask in (lease.slots, lease.state):
            with pytest.raises(
                ProtocolError, match="no component is called 'ful'; there are full, swa, mamba"
            ):
                ask("ful")
    rig.check_idle()


@pytest.mark.parametrize("layer", ["a", None, 0.0, 1.5, True, False, -1, 2, [0]], ids=repr)
def test_a_layer_is_a_whole_number_within_the_model(make_rig: MakeRig, t: T, layer: Any) -> None:
    with (
        make_rig().cache.match(t(12)) as lease,
        pytest.raises(ValueError, match="no whole number within 0 to 1"),
    ):
        lease.wait_layer(layer)


def test_a_layer_may_be_numpy_s(make_rig: MakeRig, t: T) -> None:
    with make_rig().cache.match(t(12)) as lease:
        assert lease.wait_layer(np.int64(1))  # type: ignore[arg-type]  # it has __index__


@pytest.mark.parametrize("component", ["ful", 0, ["full"]], ids=repr)
def test_an_unknown_component_is_told_with_those_that_there_are(
    make_rig: MakeRig, t: T, component: Any
) -> None:
    with make_rig().cache.match(t(12)) as lease, pytest.raises(ValueError, match="there are full"):
        lease.wait_layer(0, component)
