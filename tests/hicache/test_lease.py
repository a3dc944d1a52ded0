"""One request from match to release: what each step gives, and what a caller may not do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.errors import CapacityError, ProtocolError
from hicache.lease import Lease
from hicache.types import NO_SLOT, Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


# ---- the way of a request ------------------------------------------------------------------------------------------
def test_a_request_step_by_step_leaves_its_prompt_and_answer_to_the_next(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()
    tokens = t(20)
    with rig.cache.match(tokens[:10], session="chat") as lease:
        assert (lease.reused, lease.load()) == (0, 0)
        lease.reserve(10)
        rig.write(lease, tokens, 0, 10)
        assert lease.checkpoint(10).published == 8
        lease.reserve(10)
        rig.write(lease, tokens, 10, 20)
        released = lease.release(tokens, written=19)
    assert (released.published, released.new_tokens) == (16, 8)
    with rig.cache.match([*tokens, 99]) as lease:
        assert lease.load() == 16
        assert (lease.source.device, lease.source.total) == (16, 16)
        assert rig.wrong_pages(lease, tokens) == 0
    rig.check_idle()


def test_a_checkpoint_serves_others_while_its_request_goes_on(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY)
    first = rig.cache.match(t(12))
    first.reserve(12)
    rig.write(first, t(12), 0, 12)
    first.checkpoint(12)
    with rig.cache.match(t(13)) as second:
        assert second.load() == 12
        assert rig.wrong_pages(second, t(13)) == 0
    rig.check()
    first.release(t(12))
    rig.check_idle()


def test_a_mark_waits_for_a_slot_that_its_state_needs(make_rig: MakeRig, t: T) -> None:
    """L1 has two states: the running request's, and one that is nowhere else yet. Its way down is short."""
    rig = make_rig("full+mamba", device={"full": 16, "mamba": 2}, host=16, policy__write="write_back")
    rig.serve(t(8))  # leaves its state in L1
    other = [1000 + token for token in range(9)]
    with rig.cache.match(other) as lease:
        lease.reserve(8)
        rig.write(lease, other, 0, 8)
        assert lease.checkpoint(8).states == ("mamba",)
        lease.release(other, written=8)
    rig.cache.drain()
    assert [rig.cache.probe([*prompt, 1]).boundary for prompt in (t(8), other[:8])] == [8, 8]
    rig.check_idle()


def test_a_chunk_without_a_mark_is_no_boundary_for_a_hybrid(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+mamba")
    lease = rig.cache.match(t(16))
    lease.reserve(8)
    rig.write(lease, t(16), 0, 8)
    lease.checkpoint(8, mark=False)
    assert rig.cache.probe(t(16)).boundary == 0
    assert rig.cache.probe(t(16)).fork == 8
    lease.abandon()
    rig.check_idle()


def test_nothing_is_published_that_was_not_released(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY)
    with rig.cache.match(t(12)) as lease:
        lease.reserve(12)
        rig.write(lease, t(12), 0, 12)
    assert rig.cache.probe(t(13)).walked == 0
    rig.check_idle()
    assert rig.free() == 64


def test_at_least_one_token_is_left_to_compute(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(page_size=1)
    rig.serve(t(8))
    assert rig.cache.probe(t(8)).boundary == 7
    assert rig.cache.probe(t(9)).boundary == 8
    assert rig.serve(t(1)).source.total == 0


def test_slots_name_the_whole_prefix_and_skip_what_a_window_does_not_keep(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+swa")
    rig.serve(t(24))
    with rig.cache.match(t(30)) as lease:
        assert lease.load() == 24
        lease.reserve(6)
        full, window = lease.slots("full"), lease.slots("swa")
        assert (len(full), len(window)) == (8, 8)
        assert len(set(full.tolist())) == 8
        assert window[:3].tolist() == [NO_SLOT] * 3  # page 3 still belongs to the mark at 20
        assert (window[4:] != NO_SLOT).all()
        with pytest.raises(ProtocolError, match="nothing"):
            lease.slots("nothing")


def test_a_request_writes_into_a_state_of_its_own(make_rig: MakeRig, t: T) -> None:
    """A claim copies the shared state: what the request writes there changes nobody else's."""
    rig = make_rig("full+mamba")
    rig.serve(t(8))
    with rig.cache.match(t(12)) as first, rig.cache.match(t(12)) as second:
        assert (first.load(), second.load()) == (8, 8)
        assert first.state("mamba") != second.state("mamba")
        rig.cache.device.write("mamba", first.state("mamba"), b"\xee" * 48)
        assert rig.wrong_pages(second, t(12)) == 0
        rig.check()
    rig.check_idle()


def test_a_plan_says_what_load_will_move(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+swa", host=64)
    rig.serve(t(24))
    rig.squeeze()
    with rig.cache.match(t(25)) as lease:
        steps = {(step.component, step.source, step.first_page, step.last_page) for step in lease.plan()}
        assert steps == {("full", Tier.HOST, 0, 6), ("swa", Tier.HOST, 4, 6)}
        moved = {
            row.component: row.slots
            for row in rig.cache.stats().transfers.moved
            if row.direction == "to_device"
        }
        assert moved == {}
        lease.load()
        assert lease.plan() == ()
        moved = {
            row.component: row.slots
            for row in rig.cache.stats().transfers.moved
            if row.direction == "to_device"
        }
        assert moved == {"full": 6, "swa": 2}


def test_load_twice_moves_nothing_twice(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64)
    rig.serve(t(24))
    rig.squeeze()
    with rig.cache.match(t(25)) as lease:
        assert lease.load() == 24
        moved = rig.cache.stats().transfers.moved
        assert lease.load() == 24
        assert rig.cache.stats().transfers.moved == moved
        assert (lease.source.host, lease.source.device) == (24, 0)


def test_without_load_only_what_is_on_the_device_is_reused(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64)
    rig.serve(t(24))
    rig.squeeze()
    with rig.cache.match(t(25)) as lease:
        assert lease.reused == 24
        lease.reserve(25)
        assert lease.reused == 0
        rig.write(lease, t(25), 0, 25)
        lease.release(t(25))
    rig.check_idle()


def test_every_layer_is_there_after_load(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+mamba", host=64)
    rig.serve(t(8))
    rig.squeeze()
    with rig.cache.match(t(9)) as lease:
        assert lease.load() == 8
        for layer in range(3):
            lease.wait_layer(layer)
        for layer in (-1, 3):
            with pytest.raises(ValueError, match=f"layer {layer}"):
                lease.wait_layer(layer)


def test_a_hint_names_the_fork_and_the_next_request_is_served_from_it(make_rig: MakeRig, t: T) -> None:
    """O-20: FULL goes deeper than any state, so this prefill leaves one where they part."""
    rig = make_rig("full+mamba")
    rig.serve([*t(20), *t(130, 101)])
    with rig.cache.match([*t(20), *t(230, 201)]) as lease:
        assert lease.reused == 0
        assert lease.checkpoint_hint == 20
        assert lease.checkpoints == (20, 48)
    rig.serve([*t(20), *t(230, 201)])
    assert rig.serve([*t(20), *t(330, 301)]).source.total == 20
    assert rig.cache.stats().tree["fork_tokens"] == 40


def test_a_long_prompt_leaves_spare_marks(make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shares a part of it is reused up to the last of them, at the first time already."""
    monkeypatch.setattr("hicache.assembly.spacing_of", lambda _specs, _page_size: 12)
    rig = make_rig("full+mamba")
    with rig.cache.match(t(50)) as lease:
        assert lease.checkpoints == (12, 24, 36, 48)
    rig.serve(t(50))
    with rig.cache.match([*t(30), *t(230, 201)]) as lease:
        assert lease.reused == 24
        assert lease.checkpoints == (28, 36, 48, 56)


def test_where_to_pause_is_told_without_asking_the_core(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be in it, and the property takes no lock."""
    rig = make_rig("full+mamba")
    with rig.cache.match(t(50)) as lease, monkeypatch.context() as patched:
        patched.delattr(lease._runtime, "core")
        assert lease.checkpoints == (48,)


def test_a_model_of_paths_only_needs_no_pauses(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()
    with rig.cache.match(t(30)) as lease:
        assert (lease.checkpoints, lease.checkpoint_hint) == ((), None)


# ---- room ----------------------------------------------------------------------------------------------------------
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


# ---- every way out -------------------------------------------------------------------------------------------------
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


# ---- what a caller may not do --------------------------------------------------------------------------------------
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
