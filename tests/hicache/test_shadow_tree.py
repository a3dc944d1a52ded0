"""The tree of blocks that all shadows share, against one that keeps block by block what each order holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.policy.shadow_tree import ShadowTree
from hicache.types import LeaseId, SessionId

ONE, TWO = SessionId(1), SessionId(2)


def chained(prompt: list[int]) -> list[int]:
    """A number for each block, equal where it and all before it are."""
    return [hash(tuple(prompt[: at + 1])) & 0x7FFFFFFF for at in range(len(prompt))]


@dataclass
class Plain:
    """One order: a block is what stands before and at it; the last blocks of least rank go first."""

    capacity: int
    by_worth: bool

    def __post_init__(self) -> None:
        self.used: dict[tuple[int, ...], tuple[int, LeaseId]] = {}
        self.worth: dict[LeaseId, int] = {}
        self.now = 0

    def serve(self, lease: LeaseId, worth: int, prompt: list[int], num_prompt: int) -> int:
        self.now += 1
        self.worth[lease] = worth
        blocks = [tuple(prompt[: at + 1]) for at in range(len(prompt))]
        hits = sum(block in self.used for block in blocks[:num_prompt])
        self.used.update((block, (self.now, lease)) for block in blocks)
        while len(self.used) > self.capacity:
            parents = {block[:-1] for block in self.used}
            del self.used[min((block for block in self.used if block not in parents), key=self.rank)]
        return hits

    def rank(self, block: tuple[int, ...]) -> tuple[int, int]:
        used, lease = self.used[block]
        return (self.worth[lease] if self.by_worth else 0, used)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
calls = st.lists(st.tuples(prompts, st.integers(1, 9), st.integers(0, 11), st.integers(0, 40)), max_size=50)


@given(calls, st.sampled_from([12, 20, 60]))
def test_each_order_hits_what_it_would_hit_alone(
    calls: list[tuple[list[int], int, int, int]], capacity: int
) -> None:
    """Of one session nothing is shared; so grace moves nothing, and all three orders are told apart by worth alone."""
    tree = ShadowTree([None, 2, 0], capacity)
    alone = [Plain(capacity, by_worth) for by_worth in (True, False, False)]
    for number, (prompt, worth, left_out, rated) in enumerate(calls):
        lease, num_prompt = LeaseId(number), max(0, len(prompt) - left_out)
        hits = [order.serve(lease, worth, prompt, num_prompt) for order in alone]
        assert tree.serve(ONE, lease, worth, chained(prompt), num_prompt) == hits
        if rated < number:
            tree.rate(LeaseId(rated), rated % 10 + 1)
            for order in alone:
                order.worth[LeaseId(rated)] = rated % 10 + 1


@given(calls)
def test_the_tree_keeps_nothing_that_no_order_holds(calls: list[tuple[list[int], int, int, int]]) -> None:
    tree = ShadowTree([None, 2, 16], 12)
    for number, (prompt, worth, session, _) in enumerate(calls):
        tree.serve(SessionId(session % 3), LeaseId(number), worth, chained(prompt), len(prompt))
        runs = list(tree._runs.values())
        for order in range(3):
            assert sum(run.held[order] for run in runs) == tree._num_held[order] <= 12
        assert all(max(run.held) == len(run.blocks) for run in runs)
        assert {run.turn.lease for run in runs} == set(tree._turns)
        assert all(len(queue) <= 2 * len(runs) + 64 for queue in tree._queues)


@pytest.mark.parametrize(("grace", "stays"), [(0, False), (16, True)], ids=["none", "much"])
def test_what_two_sessions_used_stays_longer_by_its_grace(grace: int, *, stays: bool) -> None:
    tree = ShadowTree([grace], 10)
    number = 0

    def serve(session: int, prompt: list[int]) -> int:
        nonlocal number
        number += 1
        [hits] = tree.serve(SessionId(session), LeaseId(number), 1, chained(prompt), len(prompt))
        return hits

    for once in range(100, 120):  # until it is known how long what is used once stays
        serve(once, [once])
    assert serve(1, [0, 1]) == 0
    assert serve(2, [0, 1]) == 2
    for once in range(200, 212):
        serve(once, [once])
    assert (serve(3, [0, 1]) == 2) is stays


def test_a_session_that_comes_back_shares_nothing_with_itself() -> None:
    tree = ShadowTree([16], 10)
    for once in range(100, 120):
        tree.serve(SessionId(once), LeaseId(once), 1, chained([once]), 1)
    for turn in (1, 2):
        tree.serve(ONE, LeaseId(turn), 1, chained([0, 1]), 2)
    for once in range(200, 212):
        tree.serve(SessionId(once), LeaseId(once), 1, chained([once]), 1)
    assert tree.serve(TWO, LeaseId(3), 1, chained([0, 1]), 2) == [0]


def test_a_request_of_no_whole_block_is_none() -> None:
    tree = ShadowTree([None, 2, 16], 10)
    assert tree.serve(ONE, LeaseId(1), 1, [], 0) == [0, 0, 0]
    tree.rate(LeaseId(1), 5)
    assert tree.serve(ONE, LeaseId(2), 1, chained([1, 2]), 2) == [0, 0, 0]
