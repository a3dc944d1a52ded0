"""Each decision that depends on one rank's capacity, clock or I/O: made by all alike."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.errors import CapacityError, ProtocolError, RankGroupError
from hicache.radix.keys import page_keys
from hicache.ranks.agreement import AgreementStats
from hicache.replay.stamps import Stamps
from hicache.testing.rank_loads import settings
from hicache.testing.ranks import Rank, Team
from hicache.testing.scripted_store import MISS, Raise
from hicache.types import DEFAULT_NAMESPACE, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hicache.lease import Lease
    from hicache.types import PageKey, TierTokens
    from tests.ranks.conftest import MakeTeam

LONG: dict[str, Any] = {"wait_limit": "20s", "store_timeout": "20s"}
TO_HOST, TO_DEVICE, LOCAL = range(3)


def count_to(last: int) -> NDArray[np.int32]:
    return np.arange(1, last + 1, dtype=np.int32)


T40 = count_to(40)
NOTHING = np.empty(0, np.int32)


def publish(rank: Rank) -> None:
    """T(40), its answer-less prompt, in every tier."""
    assert rank.engine.serve(T40, NOTHING).mismatches == 0
    assert rank.cache.drain()


def leave_l3_only(rank: Rank) -> None:
    publish(rank)
    rank.cache.reset()


def leave_l2_only(rank: Rank) -> None:
    publish(rank)
    with rank.cache.match(np.array([9_999_999], np.int32)) as lease:
        lease.reserve(rank.cache.device.num_slots("full") * 4)
    assert rank.cache.drain()


def reuse(rank: Rank, tokens: NDArray[np.int32] = T40) -> tuple[int, int]:
    """Promised and reused; every reused byte checked, and nothing published."""
    stamps = Stamps(rank.cache.identity, rank.cache.config.model.specs(), 4, DEFAULT_NAMESPACE)
    stamps.extend(tokens)
    with rank.cache.match(tokens) as lease:
        promised, reused = lease.reused, lease.load()
        assert rank.engine._check(lease, stamps, reused)[1] == 0
        return promised, reused


def on(number: int, call: Callable[[Rank], object]) -> Callable[[Rank], None]:
    """A call that one rank alone makes; it must not agree on anything."""

    def run(rank: Rank) -> None:
        if rank.number == number:
            call(rank)

    return run


def serve(rank: Rank, prompt: NDArray[np.int32]) -> TierTokens:
    return rank.engine.serve(prompt, NOTHING).source


def keys(rank: Rank) -> tuple[PageKey, ...]:
    return page_keys(rank.cache.identity, rank.cache.config.model.specs()[0], T40, 4, DEFAULT_NAMESPACE)


def pages_in(tier: Tier) -> Callable[[Rank], int]:
    """How many the tree has there, or believes there."""

    def count(rank: Rank) -> int:
        views = rank.cache._runtime.core.snapshot()
        return sum(len(view.tokens) // 4 for view in views if ("full", tier) in view.slots)

    return count


def alike(team: Team[Rank], call: Callable[[Rank], object]) -> object:
    """What all ranks answer; they answer the same, and their trees are the same afterwards."""
    answers = team.each(call)
    assert all(answer == answers[0] for answer in answers), answers
    states = team.each(Rank.state)
    assert all(state == states[0] for state in states)
    return answers[0]


# ---- loads ---------------------------------------------------------------------------------------
def test_a_page_that_one_rank_cannot_fetch_shortens_the_hit_of_all(make_team: MakeTeam) -> None:
    team = make_team(3, settings(**LONG))
    team.each(leave_l3_only)
    team.each(on(1, lambda rank: rank.store.script("get", MISS, key=keys(rank)[5])))
    assert alike(team, reuse) == (36, 20)
    assert alike(team, lambda rank: rank.cache.probe(T40).boundary) == 20, "what is not there is not believed"


def test_a_fetch_that_is_slow_on_one_rank_shortens_the_hit_of_all(make_team: MakeTeam) -> None:
    team = make_team(2, settings(prefetch={"mode": "timeout", "min_tokens": 0, "timeout_base": "10ms"}))
    team.each(leave_l3_only)
    team.each(on(1, lambda rank: rank.store.block("get")))
    assert alike(team, reuse) == (36, 0)
    team.each(on(1, lambda rank: rank.store.unscript()))


def test_a_load_that_is_slow_on_one_rank_shortens_the_hit_of_all(make_team: MakeTeam) -> None:
    team = make_team(2, settings())
    team.each(leave_l2_only)
    team.each(on(1, lambda rank: setattr(rank.streams[TO_DEVICE], "holds", 1.0)))
    assert alike(team, reuse) == (36, 0)
    team.each(Rank.mend)
    assert alike(team, lambda rank: rank.cache.drain()) is True
    assert alike(team, reuse) == (36, 36)


def test_a_state_that_one_rank_cannot_claim_is_reused_by_none(make_team: MakeTeam) -> None:
    team = make_team(2, settings("full+mamba", **LONG))
    team.each(publish)
    team.each(on(1, lambda rank: setattr(rank.streams[LOCAL], "fails", 1.0)))
    assert alike(team, reuse) == (36, 0)
    team.each(Rank.mend)
    assert alike(team, reuse) == (36, 36)


def test_a_copy_that_ended_on_one_rank_only_is_not_acted_on(make_team: MakeTeam) -> None:
    team = make_team(2, settings(write="write_through", **LONG))
    team.each(on(1, lambda rank: setattr(rank.streams[TO_HOST], "holds", 1.0)))
    team.each(lambda rank: rank.engine.serve(T40, NOTHING))
    for _ in range(3):
        team.each(lambda rank: rank.cache.poll())
        assert alike(team, lambda rank: len(rank.cache._runtime.core.in_flight())) == 1
        assert alike(team, lambda rank: rank.cache.probe(T40).source.host) == 0
    team.each(Rank.mend)
    team.each(lambda rank: rank.cache.poll())
    assert alike(team, pages_in(Tier.HOST)) == 10


# ---- L3 ------------------------------------------------------------------------------------------
def test_a_page_that_one_store_lacks_is_believed_by_none(make_team: MakeTeam) -> None:
    team = make_team(2, settings(**LONG))
    team.each(leave_l3_only)
    team.each(on(1, lambda rank: rank.store.script("exists", MISS, key=keys(rank)[3])))
    assert alike(team, reuse) == (12, 12)


def test_a_store_that_does_not_answer_one_rank_is_not_believed_by_any(make_team: MakeTeam) -> None:
    team = make_team(2, settings(**LONG))
    team.each(leave_l3_only)
    team.each(on(1, lambda rank: rank.store.script("exists", Raise(OSError("gone")))))
    assert alike(team, reuse) == (0, 0)
    assert alike(team, lambda rank: rank.cache.stats().faults["probe_failed"]) == 1


def test_what_one_store_did_not_take_is_in_l3_for_none(make_team: MakeTeam) -> None:
    team = make_team(2, settings(**LONG))
    team.each(on(1, lambda rank: rank.store.script("put", MISS, key=keys(rank)[4])))
    team.each(publish)
    assert alike(team, pages_in(Tier.STORE)) == 4
    assert alike(team, lambda rank: rank.cache.stats().faults["store_refused"]) == 1


def test_what_is_sooner_computed_on_one_rank_is_computed_by_all(make_team: MakeTeam) -> None:
    prefetch = {"mode": "wait_complete", "min_tokens": 0, "recompute_per_1024_tokens": "1s"}
    team = make_team(2, settings(prefetch=prefetch, **LONG))
    team.each(leave_l3_only)
    # 10 s for a MiB, so some 3 ms for nine pages: 0.08 ms a token is sooner. The first rank has measured nothing yet.
    team.each(
        on(1, lambda rank: setattr(rank.cache._runtime.transfers, "recent", lambda *_: (2.0**20, 400.0)))
    )
    assert alike(team, reuse) == (0, 0)
    assert alike(team, lambda rank: rank.cache.stats().faults["recompute_sooner"]) == 1


# ---- room ----------------------------------------------------------------------------------------
def test_room_that_one_rank_waits_for_in_vain_is_refused_by_all(make_team: MakeTeam) -> None:
    team = make_team(2, settings(write="write_back"))
    team.each(publish)
    team.each(on(1, lambda rank: setattr(rank.streams[TO_HOST], "holds", 1.0)))

    def demand(rank: Rank) -> object:
        with rank.cache.match(np.array([9_999_999], np.int32)) as lease:
            try:
                lease.reserve(rank.cache.device.num_slots("full") * 4)
            except CapacityError as error:
                return error.required_slots, error.free_slots
        return "granted"

    refused = alike(team, demand)
    assert isinstance(refused, tuple)
    team.each(Rank.mend)
    assert alike(team, lambda rank: rank.cache.drain()) is True
    assert alike(team, demand) == "granted"


def test_pools_are_as_large_as_on_the_smallest_rank(make_team: MakeTeam) -> None:
    trees = [settings(device=40, host=30), settings(device=33, host=37)]
    team: Team[Rank] = Team(2, lambda group: Rank(group, trees[group.rank]))
    with team:
        assert alike(team, lambda rank: rank.cache.device.num_slots("full")) == 33
        assert (
            alike(team, lambda rank: rank.cache.host is not None and rank.cache.host.num_slots("full")) == 30
        )


def test_a_rank_that_cannot_copy_does_the_same_as_the_others(make_team: MakeTeam) -> None:
    """O-65: four ranks, of which one has no working copies to L2; 50 ticks."""
    team = make_team(4, settings(**LONG))
    team.each(on(2, lambda rank: setattr(rank.streams[TO_HOST], "fails", 1.0)))
    team.each(on(2, lambda rank: setattr(rank.random, "randrange", lambda _: 0)))
    for tick in range(50):
        alike(team, partial(serve, prompt=count_to(8 + tick % 30)))
        team.each(lambda rank: rank.cache.poll())
    assert alike(team, lambda rank: rank.group.calls)
    assert alike(team, lambda rank: rank.cache.stats().faults["to_host_copy"])
    assert alike(team, pages_in(Tier.HOST)) == 0


# ---- opening and breaking up ---------------------------------------------------------------------
def test_ranks_with_different_settings_do_not_open() -> None:
    trees = [settings(write="write_through"), settings(write="write_back")]
    with pytest.raises(
        RankGroupError, match="the ranks were given different settings; model, policy, sessions"
    ):
        Team(2, lambda group: Rank(group, trees[group.rank]))


def test_a_rank_that_cannot_open_its_store_keeps_the_others_from_opening() -> None:
    team: Team[Rank | str] = Team(2, _open_or_say)
    team.end()
    assert team.members[1] == "TierUnavailableError: no disk"
    assert str(team.members[0]).startswith("RankGroupError: ")


def _open_or_say(group: Any) -> Rank | str:  # Any: a group
    from hicache.errors import HiCacheError, TierUnavailableError
    from hicache.testing.scripted_store import ScriptedStore

    class Broken(ScriptedStore):
        async def open(self) -> None:
            raise TierUnavailableError("no disk")

    try:
        return Rank(group, settings(), store=Broken() if group.rank == 1 else None)
    except HiCacheError as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_makes_another_call_is_an_error_of_all_and_closing_is_none(make_team: MakeTeam) -> None:
    team = make_team(2, settings(**LONG))

    def diverge(rank: Rank) -> str:
        lease: Lease = rank.cache.match(T40)
        try:
            rank.cache.poll() if rank.number else lease.release()
        except RankGroupError as error:
            with pytest.raises(RankGroupError, match="no longer one of a group"):
                rank.cache.match(T40)
            lease.abandon()
            rank.cache.close()
            return str(error)
        return ""

    for answer in team.each(diverge):
        assert "the ranks have made different calls, or their trees differ" in answer


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        pytest.param(lambda rank: asyncio.run(rank.cache.amatch(T40)), "use match", id="amatch"),
        pytest.param(lambda rank: asyncio.run(rank.cache.match(T40).aload()), "use load", id="aload"),
        pytest.param(lambda rank: rank.cache.admin.pause_writes(), "a restart of all ranks", id="admin"),
    ],
)
def test_calls_that_have_no_one_order_are_refused(
    make_team: MakeTeam, call: Callable[[Rank], object], instead: str
) -> None:
    team = make_team(2, settings(**LONG))
    with pytest.raises(ProtocolError, match=instead):
        team.each(call)


def test_closing_writes_what_l3_lacks_on_all_ranks() -> None:
    team: Team[Rank] = Team(2, lambda group: Rank(group, settings(write="write_back", **LONG)))
    team.each(lambda rank: rank.engine.serve(T40, NOTHING))
    team.each(lambda rank: rank.cache.close())
    team.end()
    for member in team.members:
        assert set(member.store.keys_of("put")) == set(keys(member))


# ---- what it costs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("leave", "steps"),
    [
        pytest.param(lambda rank: None, 2, id="nothing to load"),
        pytest.param(publish, 2, id="all in L1"),
        pytest.param(leave_l2_only, 4, id="from L2"),
        pytest.param(leave_l3_only, 5, id="from L3"),
    ],
)
def test_a_request_agrees_so_many_times(
    make_team: MakeTeam, leave: Callable[[Rank], object], steps: int
) -> None:
    """Match and release once each; a load once at its begin and once for each wait; decoding never."""
    team = make_team(2, settings(**LONG))
    team.each(leave)
    before = len(team.members[0].group.calls)

    def serve(rank: Rank) -> None:
        with rank.cache.match(T40) as lease:
            lease.load()
            lease.wait_layer(0)
            lease.reserve(len(T40) - lease.reused)
            for _ in range(4):
                lease.reserve(1)
            lease.release()

    team.each(serve)
    assert len(team.members[0].group.calls) - before == steps


def test_one_rank_alone_agrees_on_nothing() -> None:
    with HiCache(load_config(settings(), environ={})) as cache:
        with cache.match(T40) as lease:
            lease.load()
            lease.release()
        assert cache.agreement_stats() == AgreementStats()
        assert cache._keeper is not None
