"""Changes while a cache serves: each does what it says, in every tier, and harms no request."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.config.units import format_bytes
from hicache.errors import ConfigError, HiCacheError, ProtocolError
from hicache.last_prompts import LastPrompts
from hicache.replay.simulated import SimulatedEngine
from hicache.types import Namespace, Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"
MEMORY = {"kind": "memory", "name": "ram", "capacity": "1MiB"}
SECOND = {"kind": "memory", "name": "second", "capacity": "1MiB"}
THREADS = 3


def store_rig(make_rig: MakeRig, model: str = "full", **keywords: object) -> Rig:
    keywords.setdefault("tiers__stores", [MEMORY])
    return make_rig(model, device=64, host=64, **keywords)


def settle(rig: Rig) -> None:
    """Everything that was begun has ended, deletions too."""
    assert rig.cache.drain()
    assert rig.cache._runtime.transfers.drain(20)


# ---- clear -------------------------------------------------------------------------------------------------------------
def test_clearing_everything_empties_every_tier_and_says_how_much(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig, EVERY)
    rig.serve(t(40), session="chat")
    settle(rig)
    pages = rig.cache.stats().store.num_pages  # type: ignore[union-attr]  # it has a store
    report = rig.cache.admin.clear(everything=True)
    assert report.slots["device"]["full"] == 10
    assert (report.slots["store"], report.store_pages) == ({}, pages)
    assert report.is_complete
    for tier in ("device", "host"):
        pool = rig.cache.stats().pools["full", tier]
        assert pool.free == pool.capacity
    assert rig.cache.stats().store.num_pages == 0  # type: ignore[union-attr]  # it has a store
    assert rig.serve(t(40)).source.total == 0


def test_clearing_everything_reaches_what_the_tree_never_heard_of(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=16, host=16, store="scripted")
    rig.seed_store(t(16))
    assert rig.cache.admin.clear(everything=True).store_pages == 4
    assert rig.serve(t(16)).source.total == 0


def test_clearing_a_namespace_spares_other_tenants(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig, EVERY)
    mine, other = Namespace(salt="mine"), Namespace(salt="other")
    for namespace in (mine, other):
        rig.serve(t(40), namespace=namespace)
    settle(rig)
    report = rig.cache.admin.clear(namespace=mine)
    settle(rig)
    assert [report.slots[tier]["full"] for tier in ("device", "host", "store")] == [10, 10, 10]
    assert not any(rig.stored(t(40), namespace=mine))
    assert all(rig.stored(t(40), namespace=other))
    assert rig.serve(t(40), namespace=mine).source.total == 0
    assert rig.serve(t(40), namespace=other).source.total > 0


def test_clearing_a_prefix_takes_what_begins_with_it(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig)
    secret = np.concatenate([t(16), t(30, 10)])
    rig.serve(secret)
    rig.serve(np.concatenate([t(16), t(80, 60)]))
    settle(rig)
    report = rig.cache.admin.clear(tokens=secret[:20])
    settle(rig)
    assert report.slots["device"] == {"full": 5}
    assert rig.stored(secret) == [True] * 4 + [False] * 5
    assert rig.cache.probe(secret).boundary == 16


def test_clearing_a_session_takes_what_it_leads_to_and_spares_what_it_shares(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig)
    shared = t(16)
    mine = [np.concatenate([shared, t(100 + n, 101)]) for n in (12, 24)]
    for prompt in mine:
        rig.serve(prompt, session="mine")
    rig.serve(np.concatenate([shared, t(220, 201)]), session="other")
    settle(rig)
    report = rig.cache.admin.clear(session="mine")
    settle(rig)
    assert report.slots["device"] == {"full": 6}
    assert rig.stored(mine[1]) == [True] * 4 + [False] * 6
    assert rig.cache.probe(mine[1]).boundary == 16
    with pytest.raises(ProtocolError, match="session 'mine' is not known"):
        rig.cache.admin.clear(session="mine")


def test_what_a_lease_holds_goes_when_it_ends(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig)
    rig.serve(t(16))
    settle(rig)
    with rig.cache.match(t(17)) as lease:
        report = rig.cache.admin.clear(everything=True)
        assert report.kept_slots > 0
        assert not report.is_complete
        assert lease.load() == 16
        assert rig.wrong_pages(lease, t(17)) == 0
    assert rig.cache.admin.clear(everything=True).is_complete
    assert rig.cache.probe(t(17)).walked == 0


@pytest.mark.parametrize(
    "scope", [{}, {"everything": True, "session": "a"}, {"session": "a", "tokens": [1] * 8}]
)
def test_a_scope_must_be_one(make_rig: MakeRig, scope: dict[str, object]) -> None:
    rig = make_rig(device=16)
    with pytest.raises(ProtocolError, match="clear takes one of"):
        rig.cache.admin.clear(**scope)  # type: ignore[arg-type]  # three of them


def test_a_store_that_fails_to_clear_is_told(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> int:
        raise OSError("no")

    rig = make_rig(device=16, host=16, store="scripted")
    rig.serve(t(16))
    monkeypatch.setattr(rig.store, "clear", fail)
    with pytest.raises(HiCacheError, match="no"):
        rig.cache.admin.clear(everything=True)
    rig.check_idle()


def test_prompts_of_sessions_are_kept_within_their_bound() -> None:
    prompts = LastPrompts(max_tokens=10)
    for name, length in (("a", 4), ("b", 4), ("a", 4)):
        prompts.note(name, Namespace(), np.zeros(length, np.int32))
    assert [len(prompts.of(name)) for name in "ab"] == [2, 0]
    prompts.forget("a")
    prompts.note("c", Namespace(), np.zeros(10, np.int32))
    assert len(prompts.of("c")) == 1


def test_a_mass_of_sessions_with_short_prompts_is_bounded_by_their_number() -> None:
    """What a session costs besides its tokens would be a gigabyte otherwise."""
    prompts = LastPrompts(max_sessions=3)
    for number in range(10):
        prompts.note(f"session {number}", Namespace(), np.zeros(1, np.int32))
        prompts.note("returns", Namespace(), np.zeros(1, np.int32))
    assert len(prompts) == 3
    assert len(prompts.of("returns")) == 2


# ---- writing -----------------------------------------------------------------------------------------------------------
def test_paused_writes_reach_no_lower_tier_until_they_are_resumed(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig)
    assert rig.cache.admin.pause_writes()
    assert not rig.cache.admin.pause_writes()
    rig.serve(t(16))
    settle(rig)
    assert (rig.resident("full", Tier.HOST), any(rig.stored(t(16)))) == (0, False)
    assert rig.cache.admin.status()["writes_paused"] is True
    assert rig.cache.admin.resume_writes()
    rig.serve(t(20))
    settle(rig)
    assert all(rig.stored(t(20)))


def test_what_is_not_written_through_cannot_be_paused(make_rig: MakeRig) -> None:
    rig = store_rig(make_rig, policy__write="write_back")
    with pytest.raises(ProtocolError, match=r"policy\.write is write_back"):
        rig.cache.admin.pause_writes()


# ---- stores ------------------------------------------------------------------------------------------------------------
def test_a_store_comes_and_goes(make_rig: MakeRig, t: T, tmp_path: Path) -> None:
    """Where there was none, to a stack of two, and back."""
    rig = make_rig(device=16, host=64)
    rig.serve(t(16))
    disk = {"kind": "disk", "path": str(tmp_path / "pages"), "capacity": "4MiB"}
    assert rig.cache.admin.attach(disk).stores == ("disk",)
    rig.serve(t(20))
    settle(rig)
    assert all(rig.stored(t(20)))
    assert rig.cache.admin.attach(SECOND).stores == ("disk", "second")
    rig.serve(t(140, 100))
    settle(rig)
    assert [store["name"] for store in rig.cache.config.model_dump()["tiers"]["stores"]] == ["disk", "second"]
    assert rig.cache.admin.detach("second").stores == ("disk",)
    rig.cache.admin.clear(everything=False, tokens=[9] * 4)
    assert rig.serve(t(140, 100)).source.total == 40
    assert rig.cache.admin.detach("disk").stores == ()
    assert rig.cache.stats().store is None
    assert rig.serve(t(30, 20)).source.total == 0
    assert rig.cache.admin.attach(disk).stores == ("disk",)
    rig.cache._runtime.core.clear(None)
    assert rig.serve(t(20)).source.store == 16  # what it kept meanwhile
    rig.check_idle()


def test_what_only_a_detached_store_had_is_no_longer_promised(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig, tiers__stores=[MEMORY, SECOND], tiers__stack={"write": "first"})
    rig.serve(t(16))
    settle(rig)
    rig.squeeze()
    rig.cache.admin.detach("ram")
    rig.check_beliefs()
    rig.serve(t(20))
    settle(rig)
    assert all(rig.stored(t(20)))


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"kind": "memory", "name": "ram"}, "is also the name of stores.0"),
        ({"kind": "tape"}, "tiers.stores.1.kind"),
        ({"kind": "disk", "path": "/dev/null", "capacity": "1GiB"}, "tiers.stores.1.path"),
        ({"kind": "memory", "capacity": "1B"}, "tiers.stores.1.capacity"),
    ],
    ids=["name", "kind", "path", "capacity"],
)
def test_a_store_that_the_loader_refuses_is_not_attached(
    make_rig: MakeRig, section: dict[str, object], match: str
) -> None:
    rig = store_rig(make_rig)
    before = rig.cache.config
    with pytest.raises(ConfigError, match=match):
        rig.cache.admin.attach(section)
    assert rig.cache.config == before
    assert rig.cache.admin.status()["stores"] == ["ram"]


def test_a_store_that_does_not_open_is_not_attached(make_rig: MakeRig, t: T, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "journal").mkdir()  # where a file is expected
    rig = make_rig(device=16, host=16)
    with pytest.raises(HiCacheError, match="disk store"):
        rig.cache.admin.attach({"kind": "disk", "path": str(tmp_path / "pages"), "capacity": "4MiB"})
    assert rig.cache.admin.status()["stores"] == []
    assert rig.serve(t(16)).source.total == 0
    rig.check_idle()


def test_without_l2_no_store_can_be_attached(make_rig: MakeRig) -> None:
    rig = make_rig(device=16)
    with pytest.raises(ConfigError, match="add a host tier"):
        rig.cache.admin.attach(MEMORY)


def test_an_unknown_store_is_named_with_those_there_are(make_rig: MakeRig) -> None:
    rig = store_rig(make_rig)
    with pytest.raises(ProtocolError, match="no store is called 'tape'; there are: ram"):
        rig.cache.admin.detach("tape")


# ---- capacities --------------------------------------------------------------------------------------------------------
def test_l2_shrinks_and_grows_within_what_it_was_made_with(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=16, host=64)
    for n in range(4):
        rig.serve(t(100 * n + 64, 100 * n + 1))
    settle(rig)
    made: int = rig.cache.config.tiers.host.capacity  # type: ignore[union-attr, assignment]  # given
    half = made // 2
    report = rig.cache.admin.set_host_capacity(half)
    assert (report.before, report.is_reached) == ({"full": 64}, True)
    assert rig.cache.stats().pools["full", "host"].capacity == report.after["full"] <= 32
    rig.check_idle()
    assert rig.cache.admin.set_host_capacity(2 * half).after["full"] >= 63
    rig.serve(t(64))
    rig.check_idle()
    with pytest.raises(
        ConfigError, match=rf"^tiers\.host\.capacity: found 1MiB, but L2 was made with {format_bytes(made)};"
    ):
        rig.cache.admin.set_host_capacity("1MiB")
    with pytest.raises(ConfigError, match=r"tiers\.host\.capacity"):
        rig.cache.admin.set_host_capacity("much")


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_store_shrinks_at_once_and_grows_again(make_rig: MakeRig, t: T, tmp_path: Path, kind: str) -> None:
    section = {"kind": kind, "name": "small", "capacity": "4MiB"}
    if kind == "disk":
        section["path"] = str(tmp_path / "pages")
    rig = store_rig(make_rig, tiers__stores=[section])
    for n in range(3):
        rig.serve(t(1000 * n + 200, 1000 * n + 1))
    settle(rig)
    used = rig.cache.stats().store.used_bytes  # type: ignore[union-attr]  # it has a store
    report = rig.cache.admin.set_store_capacity("small", used // 2)
    assert report.is_reached
    stats = rig.cache.stats().store
    assert stats is not None
    assert stats.capacity_bytes == used // 2 >= stats.used_bytes
    assert stats.pages_evicted > 0
    for n in range(3):
        rig.serve(t(1000 * n + 204, 1000 * n + 1))
    rig.cache.admin.set_store_capacity("small", "4MiB")
    rig.serve(t(9200, 9001))
    settle(rig)
    assert all(rig.stored(t(9200, 9001)))
    rig.check_idle()


def test_a_store_is_not_shrunk_below_one_page_nor_below_l2_without_a_word(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig, tiers__stores=[{"kind": "memory", "name": "small", "capacity": "4MiB"}])
    with pytest.raises(ConfigError, match=r"one slot of full takes \d+ .*; expected at least \d+B") as caught:
        rig.cache.admin.set_store_capacity("small", 160)
    least = int(str(caught.value).rpartition(" ")[2].removesuffix("B"))
    report = rig.cache.admin.set_store_capacity("small", least)
    assert [line.partition(":")[0] for line in report.warnings] == ["tiers.stores.0.capacity"]
    assert "such a tier only costs" in report.warnings[0]
    assert rig.cache.admin.set_store_capacity("small", least + 1).warnings != report.warnings
    rig.serve(t(40))
    settle(rig)
    assert rig.cache.stats().store.num_pages == 1  # type: ignore[union-attr]  # it has a store
    assert rig.cache.admin.set_store_capacity("small", "4MiB").warnings == ()
    rig.check_idle()


def test_a_store_without_a_size_of_its_own_refuses(make_rig: MakeRig) -> None:
    rig = make_rig(device=16, host=16, store="scripted")
    with pytest.raises(ProtocolError, match="handed over by the program"):
        rig.cache.admin.set_store_capacity("given", "1MiB")


# ---- policies ----------------------------------------------------------------------------------------------------------
def test_policies_change_and_say_from_what_to_what(make_rig: MakeRig, t: T) -> None:
    rig = store_rig(make_rig)
    rig.serve(t(40), session="a")
    changes = {"eviction": "session", "write": "write_back", "prefetch": {"mode": "best_effort"}}
    report = rig.cache.admin.set_policy(changes)
    assert report.changed["eviction"] == ("adaptive", "session")
    assert report.changed["write"] == ("write_through", "write_back")
    assert set(report.changed) == {"eviction", "write", "prefetch"}
    assert rig.cache.config.policy.prefetch.mode == "best_effort"
    rig.serve(t(44), session="a")
    rig.serve(t(240, 200), session="b")
    rig.cache.sessions.close("a")
    assert rig.cache.admin.set_policy({"eviction": "slru"}).changed == {"eviction": ("session", "slru")}
    rig.serve(t(48), session="a")
    rig.check_idle()


def test_a_policy_without_effect_is_told_each_time_it_is_asked_for(make_rig: MakeRig) -> None:
    rig = store_rig(make_rig)
    for _ in range(2):
        report = rig.cache.admin.set_policy({"eviction": "lru", "store_admission": "unless_over"})
        assert len(report.warnings) == 1
        assert report.warnings[0].startswith(
            "policy.store_admission: unless_over has no effect with policy.eviction lru"
        )
    assert rig.cache.admin.set_policy({"eviction": "session"}).warnings == ()
    alone = make_rig(device=16)
    assert alone.cache.admin.set_policy({"admission": "ranked"}).warnings == (
        "policy.admission: ranked has no effect without L2, which it is about; give tiers.host, or leave it out",
    )


def test_what_prefill_costs_can_be_changed(make_rig: MakeRig) -> None:
    rig = store_rig(make_rig)
    rig.cache.admin.set_policy({"prefetch": {"recompute_per_1024_tokens": "1024ms"}})
    assert rig.cache._runtime.recompute.per_token_s == 0.001
    stated = rig.cache._runtime.recompute
    rig.cache.admin.set_policy({"prefetch": {"mode": "best_effort"}})
    assert rig.cache._runtime.recompute is stated, "what was learnt stays where nothing was said of it"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"eviction": "best"}, "policy.eviction"),
        ({"queues": {}}, "policy.queues: cannot change while serving"),
        ({"watermarks": {"host": {"low": 1, "high": 0}}}, "policy.watermarks.host"),
    ],
)
def test_a_policy_that_the_loader_refuses_changes_nothing(
    make_rig: MakeRig, changes: dict[str, object], match: str
) -> None:
    rig = store_rig(make_rig)
    before = rig.cache.config
    with pytest.raises(ConfigError, match=match):
        rig.cache.admin.set_policy(changes)
    assert rig.cache.config == before


def test_a_closed_cache_changes_no_more(make_rig: MakeRig) -> None:
    rig = store_rig(make_rig)
    rig.close()
    for change in (
        lambda: rig.cache.admin.clear(everything=True),
        lambda: rig.cache.admin.attach(SECOND),
        rig.cache.admin.pause_writes,
        rig.cache.admin.status,
    ):
        with pytest.raises(ProtocolError, match="the cache is closed"):
            change()


# ---- under load --------------------------------------------------------------------------------------------------------
@contextmanager
def load(rig: Rig, seed: int) -> Iterator[Callable[[], int]]:
    """Threads that serve conversations and check every byte; gives what waits until each served more."""
    done = threading.Event()
    turn = threading.Condition()
    served = [0] * THREADS
    faults: list[BaseException] = []

    def work(number: int) -> None:
        choice = random.Random(seed + number)
        engine = SimulatedEngine(rig.cache, chunk_tokens=16)
        try:
            while not done.is_set():
                topic = 1000 * choice.randrange(4)
                prompt = np.arange(topic, topic + choice.randrange(8, 90), dtype=np.int32)
                namespace = Namespace(salt=str(choice.randrange(2)))
                found = engine.serve(
                    prompt, np.arange(7, 9, dtype=np.int32), session=f"{topic}", namespace=namespace
                )
                assert found.mismatches == 0
                with turn:
                    served[number] += 1
                    turn.notify_all()
        except BaseException as error:
            faults.append(error)
            with turn:
                turn.notify_all()
            raise

    def more() -> int:
        with turn:
            wanted = [count + 3 for count in served]
            enough = lambda: faults or all(now >= then for now, then in zip(served, wanted, strict=True))  # noqa: E731
            assert turn.wait_for(enough, 60)
            assert not faults, faults
            return sum(served)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield more
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("eviction", ["lru", "session", "adaptive"])
def test_every_change_is_safe_while_requests_are_served(
    make_rig: MakeRig, tmp_path: Path, seeded_random: random.Random, eviction: str
) -> None:
    """Stamps are compared at every reuse, in L3 too; the cache is audited after each change."""
    rig = make_rig(
        EVERY,
        device={"full": 90, "swa": 60, "mamba": 30},
        host={"full": 60, "swa": 40, "mamba": 20},
        tiers__stores=[MEMORY],
        policy__eviction=eviction,
        background=True,
    )
    admin, capacity = rig.cache.admin, rig.cache.config.tiers.host.capacity  # type: ignore[union-attr]  # given
    assert capacity is not None
    disk = {"kind": "disk", "path": str(tmp_path / "pages"), "capacity": "1MiB"}
    changes: list[Callable[[], object]] = [
        lambda: admin.clear(session="1000"),
        lambda: admin.clear(namespace=Namespace(salt="0")),
        lambda: admin.clear(namespace=Namespace(salt="1"), tokens=np.arange(2000, 2016, dtype=np.int32)),
        lambda: admin.set_policy({"eviction": "slru"}),
        lambda: admin.attach(disk),
        admin.pause_writes,
        lambda: admin.set_host_capacity(capacity * 2 // 3),
        lambda: admin.set_policy({"write": "write_through_selective", "eviction": "session"}),
        admin.resume_writes,
        lambda: admin.set_store_capacity("disk", "64KiB"),
        lambda: admin.clear(everything=True),
        lambda: admin.detach("ram"),
        lambda: admin.set_host_capacity(capacity),
        lambda: admin.set_policy({"write": "write_back"}),
        lambda: admin.detach("disk"),
        lambda: admin.attach(SECOND),
        lambda: admin.clear(everything=True, wait_s=0.2),
        lambda: admin.set_policy({"eviction": eviction, "write": "write_through"}),
    ]
    with load(rig, seeded_random.randrange(2**30)) as more:
        for change in changes:
            more()
            assert change() is not None
            assert rig.cache.audit() == []
        more()
    rig.check_idle()
    assert rig.checker.mismatches == 0
    report = admin.clear(everything=True)
    assert report.is_complete
    assert rig.resident("full", Tier.HOST) == rig.resident("full", Tier.DEVICE) == 0
