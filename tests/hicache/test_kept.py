"""``cache.keep``: a preference for a time, that lapses by the clock, is bounded, and is never a pin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.clock import ManualClock
from hicache.errors import CapacityError, ProtocolError
from hicache.types import Namespace

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens


def t(length: int, first: int = 1) -> Tokens:
    """So many tokens, counted up from the first."""
    return np.arange(first, first + length, dtype=np.int32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def rig(make_rig: MakeRig, clock: ManualClock) -> Rig:
    return make_rig("full", device=8, host=0, page_size=4, session_clock=clock)


def others(rig: Rig, first: int, *, num: int = 4) -> None:
    """So many requests of two pages each, that nobody comes back for."""
    for i in range(num):
        rig.serve(t(8, 1000 * (first + i)))


def reused(rig: Rig, prompt: Tokens) -> int:
    return rig.cache.probe(prompt).boundary


def test_a_system_prompt_outlives_what_came_later_until_its_time_is_over(
    rig: Rig, clock: ManualClock
) -> None:
    system = t(8)
    rig.serve(t(9))
    assert rig.cache.keep(system, for_s=3600) == 8
    others(rig, 1)
    assert reused(rig, t(9)) == 8
    clock.advance(3600)
    others(rig, 10)
    assert reused(rig, t(9)) == 0


def test_it_may_be_said_before_the_prefix_has_ever_come_and_holds_when_it_comes_back(rig: Rig) -> None:
    assert rig.cache.keep(t(8), for_s=3600) == 0
    rig.serve(t(9))
    others(rig, 1)
    assert reused(rig, t(9)) == 8
    rig.cache.reset()
    rig.serve(t(9))
    others(rig, 10)
    assert reused(rig, t(9)) == 8


def test_it_is_no_pin(rig: Rig) -> None:
    rig.serve(t(9))
    rig.cache.keep(t(8), for_s=3600)
    rig.serve(t(32, 5000))
    assert reused(rig, t(9)) == 0


def test_it_can_be_taken_back_once(rig: Rig) -> None:
    rig.serve(t(9))
    rig.cache.keep(t(8), for_s=3600)
    assert rig.cache.unkeep(t(8))
    assert not rig.cache.unkeep(t(8))
    others(rig, 1)
    assert reused(rig, t(9)) == 0


def test_what_another_kept_prefix_shares_with_it_stays_kept(rig: Rig, clock: ManualClock) -> None:
    rig.serve(t(13))
    rig.cache.keep(t(12), for_s=60)
    rig.cache.keep(t(4), for_s=3600)
    clock.advance(60)
    others(rig, 1)
    assert reused(rig, t(13)) == 4


def test_said_again_its_time_starts_anew(rig: Rig, clock: ManualClock) -> None:
    rig.serve(t(9))
    rig.cache.keep(t(8), for_s=60)
    clock.advance(50)
    rig.cache.keep(t(8), for_s=60)
    clock.advance(50)
    others(rig, 1)
    assert reused(rig, t(9)) == 8


def test_a_clock_that_steps_back_lengthens_it_and_breaks_nothing(rig: Rig, clock: ManualClock) -> None:
    rig.serve(t(9))
    rig.cache.keep(t(8), for_s=60)
    clock._now_s -= 500.0  # no clock of ours does that by itself
    others(rig, 1)
    assert reused(rig, t(9)) == 8
    clock.advance(600)
    others(rig, 10)
    assert reused(rig, t(9)) == 0


@pytest.mark.parametrize("for_s", [0, -1, float("nan"), float("inf"), 10**400, "1h", True, None, np.int64(0)])
def test_no_time_at_all_is_refused(rig: Rig, for_s: object) -> None:
    with pytest.raises(ValueError, match="keep: for_s is"):
        rig.cache.keep(t(8), for_s=for_s)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("for_s", [1, 0.5, 1e308, np.int64(5), np.float32(5)])
def test_a_time_in_any_kind_of_number_is_taken(rig: Rig, for_s: float) -> None:
    rig.serve(t(9))
    assert rig.cache.keep(t(8), for_s=for_s) == 8


def test_less_than_a_page_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="expected at least a page of 4"):
        rig.cache.keep(t(3), for_s=60)
    with pytest.raises(ValueError, match="dimension"):
        rig.cache.keep([[1, 2], [3, 4]], for_s=60)


def test_so_many_prefixes_may_be_kept_and_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.kept.MAX_KEPT", 3)
    for i in range(3):
        rig.cache.keep(t(4, 100 * i + 1), for_s=60)
    rig.cache.keep(t(4), for_s=90)
    with pytest.raises(CapacityError, match="3 prefixes are kept"):
        rig.cache.keep(t(4, 900), for_s=60)
    rig.cache.unkeep(t(4))
    rig.cache.keep(t(4, 900), for_s=60)


def test_so_many_tokens_may_be_kept_and_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.kept.MAX_KEPT_TOKENS", 20)
    rig.cache.keep(t(12), for_s=60)
    with pytest.raises(CapacityError, match="12 tokens asked to be kept, 8 of 20 are left") as refused:
        rig.cache.keep(t(12, 900), for_s=60)
    assert (refused.value.required_slots, refused.value.free_slots) == (12, 8)
    rig.cache.keep(t(8, 900), for_s=60)


def test_a_namespace_has_prefixes_of_its_own(rig: Rig) -> None:
    rig.serve(t(9), namespace=Namespace(salt="b"))
    rig.cache.keep(t(8), for_s=60, namespace=Namespace(salt="a"))
    others(rig, 1)
    assert rig.cache.probe(t(9), namespace=Namespace(salt="b")).boundary == 0


def test_a_closed_cache_keeps_nothing(rig: Rig) -> None:
    rig.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        rig.cache.keep(t(8), for_s=60)


def test_host_copies_of_a_kept_prefix_outlive_others(make_rig: MakeRig, clock: ManualClock) -> None:
    rig = make_rig("full", device=4, host=8, page_size=4, session_clock=clock)
    rig.serve(t(9))
    rig.cache.keep(t(8), for_s=3600)
    for i in range(1, 7):
        rig.serve(t(16, 1000 * i))
    assert rig.cache.probe(t(9)).source.total == 8


@pytest.mark.parametrize("call", ["keep", "unkeep"])
def test_less_than_a_page_is_refused_by_the_call_that_was_made(make_rig: MakeRig, call: str) -> None:
    cache = make_rig().cache
    with pytest.raises(ValueError, match=f"^{call}: a prefix of 1 tokens; expected at least a page of 4"):
        cache.keep(t(1), for_s=1.0) if call == "keep" else cache.unkeep(t(1))


# ---- hybrid models -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["full+mamba", "full+swa", "full+swa+mamba", "mamba", "swa"])
def test_the_first_request_leaves_a_mark_at_the_end_of_a_kept_prefix(make_rig: MakeRig, model: str) -> None:
    """A fork would be known from the second that diverges there, and only the third be reused."""
    rig = make_rig(model)
    rig.cache.keep(t(18), for_s=3600)
    rig.cache.keep(t(8), for_s=3600)
    rig.cache.keep(np.concatenate([t(12), t(8, 500)]), for_s=3600)
    first = np.concatenate([t(16), t(30, 100)])
    with rig.cache.match(first) as lease:
        assert lease.checkpoints == (8, 16, 44)
    rig.serve(first)
    assert rig.serve(np.concatenate([t(16), t(30, 200)])).source.total == 16
    assert rig.serve(np.concatenate([t(9), t(30, 300)])).source.total == 8
    rig.check_idle()


def test_the_mark_of_a_kept_prefix_outlives_other_conversations(
    make_rig: MakeRig, clock: ManualClock
) -> None:
    rig = make_rig("full+mamba", device=8, page_size=4, session_clock=clock)
    rig.cache.keep(t(8), for_s=3600)
    rig.serve(np.concatenate([t(8), t(4, 100)]))
    others(rig, 1, num=8)
    assert reused(rig, np.concatenate([t(8), t(4, 200)])) == 8
    clock.advance(3600)
    others(rig, 20, num=8)
    assert reused(rig, np.concatenate([t(8), t(4, 200)])) == 0


def test_a_mark_of_a_kept_prefix_needs_a_token_behind_it(make_rig: MakeRig) -> None:
    """A match leaves one to compute, so the same prompt could not use it; its end is marked at release anyhow."""
    rig = make_rig("full+mamba")
    rig.cache.keep(t(16), for_s=3600)
    with rig.cache.match(t(16)) as lease:
        assert lease.checkpoints == (12,)
    with rig.cache.match(t(15)) as lease:
        assert lease.checkpoints == (12,)


def test_what_is_kept_no_longer_leaves_no_mark(make_rig: MakeRig, clock: ManualClock) -> None:
    rig = make_rig("full+mamba", session_clock=clock)
    rig.cache.keep(t(16), for_s=3600)
    rig.cache.keep(t(8), for_s=10)
    rig.cache.unkeep(t(16))
    clock.advance(10)
    with rig.cache.match(t(30)) as lease:
        assert lease.checkpoints == (28,)
