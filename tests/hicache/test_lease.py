"""A lease, step by step: from match to release."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hicache.errors import ProtocolError
from hicache.types import NO_SLOT, Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


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
