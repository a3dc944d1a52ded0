"""Hints that contradict each other, come late or come in masses: the later one holds, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.clock import ManualClock
from hicache.policy.session_order import SessionOrder
from hicache.policy.shadows import make_order
from hicache.radix.core import core_kind
from hicache.types import LeaseId, SessionId

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

CORES = ["python", "rust"] if core_kind()[0] == "rust" else ["python"]
ONE, OTHER = SessionId(1), SessionId(2)
Hint = Callable[[SessionOrder], None]


def close(order: SessionOrder) -> None:
    order.close(ONE)


def one_shot(order: SessionOrder) -> None:
    order.one_shot(ONE)


def abandon(order: SessionOrder) -> None:
    order.abandon_branch(ONE)


def reopen(order: SessionOrder) -> None:
    order.reopen(ONE)


def returns(order: SessionOrder) -> None:
    order.expects_return(ONE, 60, 0.0)


@pytest.fixture(params=[f"{policy} {core}" for policy in ("session", "adaptive") for core in CORES])
def order(request: pytest.FixtureRequest) -> SessionOrder:
    policy, core = request.param.split()
    made = make_order(policy, core, capacity_tokens=400, block_tokens=2)
    assert made is not None
    return made


def worths(order: SessionOrder, hints: list[Hint]) -> dict[LeaseId, int]:
    """What a turn of each of two sessions is worth once the first has been given the hints."""
    for name in (ONE, OTHER):
        order.begin(name, None, 0.0)
        order.end(name, LeaseId(name), 0, 0.0)
    told = dict(zip(*order.take_ratings(0.0)[:2], strict=True))
    for hint in hints:
        hint(order)
    return told | dict(zip(*order.take_ratings(0.0)[:2], strict=True))


@pytest.mark.parametrize(
    ("hints", "is_over"),
    [
        pytest.param([close, returns], False, id="closed, then comes back"),
        pytest.param([returns, close], True, id="comes back, then closed"),
        pytest.param([close, close], True, id="closed twice"),
        pytest.param([close, close, reopen], False, id="closed twice, reopened once"),
        pytest.param([one_shot, returns], False, id="one shot, then comes back"),
        pytest.param([returns, one_shot], True, id="comes back, then one shot"),
        pytest.param([one_shot, close, reopen], False, id="over for two reasons, reopened"),
        pytest.param([abandon, reopen, close], True, id="the last of three"),
        pytest.param([reopen, reopen], False, id="reopened, though never closed"),
        pytest.param([reopen, close], True, id="reopened, then closed"),
        pytest.param([returns, abandon], True, id="comes back, but not for this branch"),
        pytest.param([abandon, returns], True, id="not for this branch, but comes back"),
        pytest.param([abandon, one_shot, reopen], False, id="one word takes back all"),
    ],
)
def test_the_later_of_two_hints_holds_and_another_session_is_as_before(
    order: SessionOrder, hints: list[Hint], is_over: bool
) -> None:
    told = worths(order, hints)
    assert (told[LeaseId(ONE)] == 0) is is_over
    assert told[LeaseId(OTHER)] == 1, "what every turn is worth before anything is learnt"


def test_a_return_that_was_announced_before_the_clock_stepped_back_still_ends(order: SessionOrder) -> None:
    order.begin(ONE, None, 1000.0)
    order.end(ONE, LeaseId(1), 0, 1000.0)
    order.expects_return(ONE, 60, 1000.0)
    announced = dict(zip(*order.take_ratings(1000.0)[:2], strict=True))[LeaseId(1)]
    assert not order.take_ratings(10.0)[0], "a step back is no time at all"
    order.expects_return(ONE, 60, 10.0)
    order.take_ratings(10.0)
    overdue = dict(zip(*order.take_ratings(2000.0)[:2], strict=True))[LeaseId(1)]
    assert 0 < overdue < announced


# ---- through the cache -----------------------------------------------------------------------------------------------
@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig("full", device=8, host=0, page_size=4, session_clock=ManualClock(1000.0))


def tokens(length: int, first: int = 1) -> Tokens:
    return np.arange(first, first + length, dtype=np.int32)


def test_what_is_to_be_kept_stays_though_its_only_request_was_a_one_shot(rig: Rig) -> None:
    rig.serve(tokens(9), session="once")
    assert rig.cache.keep(tokens(8), for_s=60) == 8
    assert rig.cache.sessions.one_shot("once")
    assert rig.cache.sessions.close("once")
    for i in range(1, 5):
        rig.serve(tokens(8, 1000 * i), session=f"other {i}")
    assert rig.cache.probe(tokens(9)).boundary == 8


@pytest.mark.parametrize("hint", ["close", "one_shot", "abandon_branch"])
def test_a_hint_after_the_release_holds_for_what_the_request_left(rig: Rig, hint: str) -> None:
    rig.serve(tokens(8), session="left")
    rig.serve(tokens(8, 1000), session="stays")
    assert getattr(rig.cache.sessions, hint)("left")
    assert getattr(rig.cache.sessions, hint)("left"), "said again"
    rig.serve(tokens(24, 2000), session="new")
    assert rig.cache.probe(tokens(8)).boundary == 0
    assert rig.cache.probe(tokens(9, 1000)).boundary == 8


@pytest.mark.parametrize("hint", ["close", "reopen", "one_shot", "abandon_branch"])
def test_a_name_of_10_kb_is_unknown_to_every_hint_and_refused_by_a_request(rig: Rig, hint: str) -> None:
    name = "x" * 10_000
    rig.serve(tokens(8), session="x")
    assert getattr(rig.cache.sessions, hint)(name) is False
    assert rig.cache.sessions.expects_return(name, 5) is False
    with pytest.raises(ValueError, match="1 to 1024 characters"):
        rig.serve(tokens(8, 1000), session=name)
    assert [view.name for view in rig.cache.sessions] == ["x"]
    rig.check_idle()


def test_a_branch_that_was_abandoned_goes_first_though_the_edited_turn_shares_most_of_it(rig: Rig) -> None:
    rig.serve(tokens(8, 500), session="older")
    rig.serve(tokens(20), session="edits")
    assert rig.cache.sessions.abandon_branch("edits")
    edited = np.concatenate([tokens(12), tokens(4, 900)])
    rig.serve(edited, session="edits")
    assert rig.free() == 0
    rig.serve(tokens(8, 2000), session="new")
    assert rig.cache.probe(tokens(21)).boundary == 12
    assert [rig.cache.probe([*each, 1]).boundary for each in (tokens(8, 500), edited)] == [8, 16]


# ---- masses ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif("rust" not in CORES, reason="a million requests take minutes on the Python order")
def test_a_million_sessions_of_one_request_and_their_hints_keep_bounded_memory() -> None:
    """Every second one is closed."""
    order = make_order("session", "rust", capacity_tokens=400, block_tokens=2)
    assert order is not None
    most = 0
    for number in range(1_000_000):
        name, now_s = SessionId(number), number * 0.001
        order.begin(name, None, now_s)
        order.end(name, LeaseId(number), 0, now_s)
        if number % 2:
            order.close(name)
        if number % 1000 == 0:
            order.take_ratings(now_s)
            most = max(most, len(order))
    assert most <= 100_000
    order.take_ratings(1e6)
    assert len(order) <= 100_000
    order.bury([LeaseId(number) for number in range(1_000_000)])
    assert len(order) == 0, "nothing of them is in the tree any more"
