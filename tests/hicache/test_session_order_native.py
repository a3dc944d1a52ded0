"""Both implementations of the session order, given the same calls, say the same (as test_differential does)."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.policy.session_order import SessionOrder, make_session_order
from hicache.policy.shadows import make_order
from hicache.radix.core import core_kind
from hicache.types import LeaseId, SessionId

IS_QUICK = os.environ.get("HICACHE_TEST_PROFILE") == "quick"
CASES = 50 if IS_QUICK else 500
NEVER = LeaseId(10**9)

HINTS = ("close", "one_shot", "reopen", "abandon_branch")
STEPS_S = (0.0, 0.3, 1.0, 2.5, 7.0, 30.0, 200.0, 3000.0, -50.0, 20_000.0)


class Pair:
    """Both, and the turns that they know.

    Args:
        capacity: of the cache whose shadows they watch, in tokens; None for ``session`` without any.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.orders = tuple(
            make_session_order(core)
            if capacity is None
            else make_order("adaptive", core, capacity_tokens=capacity, block_tokens=2)
            for core in ("python", "rust")
        )
        self.followed = {"session"}
        self.now_s = 0.0
        self.opened: list[SessionId] = []
        self.ended: list[LeaseId] = []

    def call(self, name: str, *args: object) -> None:
        expected, actual = (getattr(order, name)(*args) for order in self.orders)
        assert actual == expected

    def play(self, choices: list[int]) -> None:
        """Each choice is one call, and what it is about."""
        for choice in choices:
            kind, about = choice % 16, choice // 16
            session = SessionId(about % 6 - 1)
            if kind < 6:
                recent = [NEVER, *self.ended[-5:]]
                reused = None if about % 7 == 0 else recent[about % len(recent)]
                self.call("begin", session, reused, self.now_s, (0, 50, 50, 77, 100)[about % 5])
                self.opened.append(session)
            if 3 <= kind < 9 and self.opened:
                session = self.opened.pop(about % len(self.opened))
                lease = LeaseId(len(self.ended))
                self.call("end", session, lease, about % 3, self.now_s)
                self.ended.append(lease)
                self.watch(session, about)
            elif kind == 9:
                self.call(HINTS[about % len(HINTS)], session)
            elif kind == 10:
                self.call("expects_return", session, 0.5 + about % 900, self.now_s)
            elif kind == 11 and self.ended:
                self.call("bury", self.ended[about % len(self.ended) :: 3])
            elif kind == 12 and about % 40 == 0:
                self.call("clear")
            else:
                self.now_s += STEPS_S[about % len(STEPS_S)]
            self.agree()

    def watch(self, session: SessionId, about: int) -> None:
        """Prompts of some pages behind one of a few beginnings, so that some is met again and some is not."""
        tokens = np.arange(2 * (3 + about % 9), dtype=np.int32) + 100 * (about % 23)
        self.call("watch", session, tokens, len(tokens) - about % 5, about % 2)

    def agree(self) -> dict[LeaseId, int]:
        """Returns what was rated anew."""
        python, rust = self.orders
        assert python is not None
        assert rust is not None
        assert rust.followed == python.followed
        assert rust.shadow_hits == python.shadow_hits
        self.followed.add(rust.followed)
        expected, actual = (order.take_ratings(self.now_s) for order in (python, rust))
        told = [
            {lease: (worth, regard) for lease, worth, regard in zip(*ratings, strict=True)}
            for ratings in (expected, actual)
        ]
        assert told[1] == told[0]
        assert len(rust) == len(python)
        for lease in self.ended[-8:]:
            assert rust.session_of(lease) == python.session_of(lease)
        return dict(zip(*expected[:2], strict=True))


needs_rust = pytest.mark.skipif(
    core_kind("auto")[0] != "rust" and os.environ.get("HICACHE_REQUIRE_RUST") != "1",
    reason="the Rust core was not built (HICACHE_REQUIRE_RUST=1 makes this a failure)",
)


@needs_rust
@settings(max_examples=CASES)
@given(choices=st.lists(st.integers(0, 2**16), min_size=20, max_size=300))
def test_both_rate_the_same_after_any_sequence_of_calls(choices: list[int]) -> None:
    Pair().play(choices)


@needs_rust
@settings(max_examples=CASES // 10)
@given(
    choices=st.lists(st.integers(0, 2**16), min_size=100, max_size=400),
    capacity=st.sampled_from([8, 40, 100_000]),
)
def test_both_follow_the_same_policy_after_any_sequence_of_calls(choices: list[int], capacity: int) -> None:
    Pair(capacity).play(choices)


@needs_rust
def test_both_change_to_another_policy_at_the_same_request() -> None:
    """Prompts that are each asked for a few times in short order, by sessions of one request.

    Turns that were old by then are rated with the rest: none keeps for ever what it was worth by another order.
    """
    pair = Pair(capacity=400)
    worth = {}
    for i in range(1200):
        session, lease = SessionId(i), LeaseId(i)
        pair.now_s += 20_000.0 if i == 10 else 0.0
        hot = i // 30 * 5 + i * 7 % 5
        tokens = np.concatenate([np.arange(40) + 100 * hot, [7 * i, 8, 9, 10]]).astype(np.int32)
        pair.now_s += 1.0
        pair.call("begin", session, None, pair.now_s, 50)
        pair.call("end", session, lease, 0, pair.now_s)
        pair.call("watch", session, tokens, len(tokens), 0)
        worth.update(pair.agree())
    assert len(pair.followed) > 1
    assert {worth[LeaseId(i)] for i in range(10)} == {worth[LeaseId(1199)]}


def test_the_rust_order_has_every_method_of_the_python_one() -> None:
    if core_kind("auto")[0] != "rust":
        pytest.skip("the Rust core was not built")
    methods = {name for name in vars(SessionOrder) if not name.startswith("_")}
    assert methods <= set(dir(make_session_order("rust")))
