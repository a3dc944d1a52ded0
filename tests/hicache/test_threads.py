"""Many threads on one cache: nothing mixed, nothing lost, and nobody waits for somebody else's I/O."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.errors import CapacityError, ProtocolError
from hicache.radix.interface import TreeCore
from hicache.replay.simulated import SimulatedEngine
from hicache.testing.scripted_store import MISS, Raise
from hicache.types import Namespace

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"
THREADS = 6
PATIENCE_S = 60.0
"""For what comes soon, however busy the machine."""
HANGS_FOR = "600s"
"""The limit of what hangs on purpose: far beyond the patience with those whom it must not hold up."""


@pytest.fixture
def nervous() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:  # Any: whatever the call gives
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


def random_prompt(choice: random.Random, *, length: int = 60) -> Tokens:
    """A path through a small tree of prompts: many share beginnings, few are equal."""
    parts = [np.arange(1, 1 + choice.randrange(4, 21), dtype=np.int32)]
    while sum(map(len, parts)) < length:
        begin = 1000 * choice.randrange(1, 4) + 100 * len(parts)
        parts.append(np.arange(begin, begin + choice.randrange(1, 20), dtype=np.int32))
    return np.concatenate(parts)[: choice.randrange(1, length)]


def serve_all(rig: Rig, prompts: list[list[Tokens]], namespaces: list[Namespace]) -> tuple[int, int]:
    """One engine a thread, each with its own prompts; prompt tokens and reused tokens of all."""

    def work(mine: list[Tokens], namespace: Namespace) -> tuple[int, int]:
        engine = SimulatedEngine(rig.cache, chunk_tokens=16)
        reused = 0
        for number, prompt in enumerate(mine):
            answer = np.arange(500, 500 + number % 7, dtype=np.int32)
            served = engine.serve(prompt, answer, session=f"session {number % 5}", namespace=namespace)
            assert served.mismatches == 0
            reused += served.source.total
        return sum(map(len, mine)), reused

    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(work, prompts, namespaces))
    return sum(total for total, _ in results), sum(reused for _, reused in results)


# ---- many at once ----------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("nervous")
@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_threads_on_one_cache_never_read_each_others_bytes(
    make_rig: MakeRig, model: str, write: str, seeded_random: random.Random
) -> None:
    """O-64: and the sources of all add up to the prompts of all."""
    rig = make_rig(
        model, device=120, host=60, store="scripted", policy__write=write, policy__wait_limit="60s"
    )
    prompts = [[random_prompt(seeded_random) for _ in range(12)] for _ in range(THREADS)]
    namespaces = [Namespace(salt=str(number % 2)) for number in range(THREADS)]
    prompt_tokens, reused = serve_all(rig, prompts, namespaces)
    rig.check_idle()
    counts = rig.cache.stats().tokens
    assert (counts.prompt, counts.hit) == (prompt_tokens, reused)
    assert rig.cache.stats().requests == 12 * THREADS
    assert rig.checker.mismatches == 0
    assert rig.cache.stats().sessions["active"] == 0


@pytest.mark.usefixtures("nervous")
def test_fifty_requests_at_once_sum_up(make_rig: MakeRig, seeded_random: random.Random) -> None:
    """O-64."""
    rig = make_rig(EVERY, device=900, host=200, store="scripted")
    prompts = [[random_prompt(seeded_random)] for _ in range(50)]
    prompt_tokens, reused = serve_all(rig, prompts, [Namespace()] * 50)
    counts = rig.cache.stats().tokens
    assert (counts.prompt, counts.hit, counts.computed) == (prompt_tokens, reused, prompt_tokens - reused)
    rig.check_idle()


@pytest.mark.usefixtures("nervous")
def test_a_store_that_fails_now_and_then_harms_nobody(
    make_rig: MakeRig, seeded_random: random.Random
) -> None:
    rig = make_rig(EVERY, device=150, host=40, store="scripted", policy__wait_limit="60s")
    for operation in ("get", "put", "exists"):
        for call in range(1, 200, 3):
            fault = seeded_random.choice([MISS, Raise(OSError("now and then"))])
            rig.store.script(operation, fault, call=call)  # type: ignore[arg-type]  # three of them
    prompts = [[random_prompt(seeded_random) for _ in range(10)] for _ in range(THREADS)]
    serve_all(rig, prompts, [Namespace()] * THREADS)
    rig.check_idle()
    assert rig.checker.mismatches == 0


@pytest.mark.usefixtures("nervous")
def test_audits_probes_and_views_may_be_taken_at_any_time(
    make_rig: MakeRig, seeded_random: random.Random
) -> None:
    rig = make_rig(EVERY, device=150, host=40, store="scripted", policy__wait_limit="60s")
    done, begun = threading.Event(), threading.Barrier(3)

    def watch() -> int:
        rounds = 0
        begun.wait(PATIENCE_S)  # a thread that is late would see nothing
        while not (rounds and done.is_set()):
            assert rig.cache.audit() == []
            rig.cache.stats()
            rig.cache.probe(np.arange(1, 30, dtype=np.int32))
            list(rig.cache.sessions)
            rig.cache.sessions.close("session 3")
            rig.cache.poll()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as pool:
        watching = [pool.submit(watch) for _ in range(2)]
        try:
            begun.wait(PATIENCE_S)
            prompts = [[random_prompt(seeded_random) for _ in range(10)] for _ in range(3)]
            serve_all(rig, prompts, [Namespace()] * 3)
        finally:
            done.set()
        assert min(each.result(PATIENCE_S) for each in watching) > 0
    rig.check_idle()


@pytest.mark.usefixtures("nervous")
def test_sessions_may_be_looked_at_while_others_begin(make_rig: MakeRig) -> None:
    rig = make_rig()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            assert sum(rig.cache.sessions.count().values()) >= 0
            assert all(view.name for view in rig.cache.sessions)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            for number in range(2000):
                rig.cache.match([1, 2], session=f"session {number}").abandon()
        finally:
            done.set()
        looking.result(PATIENCE_S)
    assert len(rig.cache.sessions) == 2000


@pytest.mark.usefixtures("nervous")
def test_resets_among_requests_leave_no_trace(make_rig: MakeRig, seeded_random: random.Random) -> None:
    """O-31: a request that a reset hits is told so; the others are served, and their bytes are right."""
    rig = make_rig(EVERY, device=150, host=60, store="scripted", policy__wait_limit="60s")
    prompts = [[random_prompt(seeded_random) for _ in range(10)] for _ in range(4)]
    hit_by_reset = 0

    def work(mine: list[Tokens]) -> int:
        engine = SimulatedEngine(rig.cache)
        refused = 0
        for prompt in mine:
            try:
                assert engine.serve(prompt, np.empty(0, np.int32)).mismatches == 0
            except ProtocolError:
                refused += 1
        return refused

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, mine) for mine in prompts]
        for _ in range(5):
            rig.cache.reset()
        hit_by_reset = sum(result.result(60) for result in results)
    rig.check_idle()
    assert rig.cache.stats().requests == 40 - hit_by_reset
    rig.cache.reset()
    assert all(count.free == count.capacity for count in rig.cache.stats().pools.values())


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_close_is_not_held_up_by_requests_that_keep_coming(
    make_rig: MakeRig, seeded_random: random.Random, write: str
) -> None:
    """Others go on for as long as they are let: the close refuses them, drains, and ends."""
    rig = make_rig(EVERY, device=150, host=60, store="scripted", policy__write=write)
    prompts = [random_prompt(seeded_random) for _ in range(50)]
    begun = threading.Barrier(4)

    def work(offset: int) -> int:
        engine = SimulatedEngine(rig.cache)
        begun.wait(PATIENCE_S)
        for number in range(offset, 1_000_000):
            try:
                assert engine.serve(prompts[number % 50], np.empty(0, np.int32)).mismatches == 0
            except ProtocolError:
                return number - offset
        raise AssertionError("the close never came")

    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(work, 7 * number) for number in range(3)]
        begun.wait(PATIENCE_S)
        while rig.cache.stats().requests < 60:
            pass
        rig.cache.close()
        assert sum(result.result(PATIENCE_S) for result in results) < 10_000
    assert rig.checker.mismatches == 0


# ---- nobody holds the lock while waiting (O-67) ------------------------------------------------------------------------
def busy(rig: Rig, tokens: Tokens) -> None:
    """What another thread goes on doing: a whole request on a cached prefix, a probe, an audit."""
    done = threading.Event()

    def work() -> None:
        assert rig.cache.probe(tokens).boundary > 0
        with rig.cache.match(tokens) as lease:
            assert lease.load() > 0
            lease.reserve(1)
        rig.cache.poll()
        rig.cache.stats()
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert done.wait(PATIENCE_S), "another request is held up"
    thread.join()


@pytest.mark.parametrize("operation", ["exists", "get"])
def test_a_store_that_hangs_holds_up_only_who_asked_it(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[int]], operation: str
) -> None:
    """O-67."""
    rig = make_rig(
        EVERY,
        host=64,
        store="scripted",
        policy__prefetch={"mode": "wait_complete", "min_tokens": 40},
        policy__wait_limit=HANGS_FOR,
        policy__store_timeout=HANGS_FOR,
    )
    rig.serve(t(20))
    rig.check_idle()
    for component in ("full", "swa", "mamba"):
        rig.seed_store(t(1040, 1001), component)
    gate = rig.store.block(operation)  # type: ignore[arg-type]  # the two of them
    waiting = aside(lambda: rig.engine.serve(t(1041, 1001), t(0)).source.total)
    assert gate.reached.wait(PATIENCE_S)
    busy(rig, t(21))
    assert not waiting.done()
    gate.release()
    assert waiting.result(PATIENCE_S) == 40
    rig.check_idle()


@pytest.mark.parametrize("stream", ["to_host", "to_device", "local"])
def test_a_copy_that_hangs_holds_up_only_who_needs_it(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[Any]], stream: str
) -> None:
    rig = make_rig(
        "full+mamba",
        device={"full": 24, "mamba": 12},
        host=64,
        stepped=True,
        policy__wait_limit=HANGS_FOR,
    )
    with rig.stepping():
        rig.serve(t(40))
        rig.squeeze()
        rig.serve(t(1040, 1001))
    waits: dict[str, Callable[[], object]] = {
        "to_host": lambda: serve_and_take_all(rig, t(2048, 2001)),
        "to_device": lambda: rig.engine.serve(t(41), t(0)),
        "local": lambda: rig.engine.serve(t(1041, 1001), t(0)),
    }
    waiting = aside(waits[stream])
    while not getattr(rig, stream).num_pending:
        for name in {"to_host", "to_device", "local"} - {stream}:
            getattr(rig, name).step_all()
    done = threading.Event()

    def others() -> None:
        assert rig.cache.probe(t(41)).boundary == 40
        rig.cache.match(t(41)).abandon()
        assert rig.cache.audit() == []
        done.set()

    aside(others)
    assert done.wait(PATIENCE_S), "another request is held up"
    assert not waiting.done()
    with rig.stepping():
        waiting.result(PATIENCE_S)
    rig.step_all()
    rig.check_idle()


def serve_and_take_all(rig: Rig, tokens: Tokens) -> None:
    """A request whose backup is under way when another one wants its room."""
    rig.engine.serve(tokens, tokens[:0])
    make_room_for(rig, np.arange(9000, 9000 + 24 * 4, dtype=np.int32))


def make_room_for(rig: Rig, tokens: Tokens) -> None:
    with rig.cache.match(tokens) as lease:
        lease.reserve(len(tokens))


def test_a_flush_into_a_store_that_hangs_holds_up_nobody(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[bool]]
) -> None:
    rig = make_rig(
        EVERY,
        host=64,
        store="scripted",
        policy__write="write_back",
        policy__wait_limit=HANGS_FOR,
        policy__store_timeout=HANGS_FOR,
    )
    rig.serve(t(20))
    gate = rig.store.block("put")
    flushing = aside(rig.cache.flush)
    assert gate.reached.wait(PATIENCE_S)
    busy(rig, t(21))
    assert not flushing.done()
    gate.release()
    assert flushing.result(PATIENCE_S)
    rig.check_idle()


def test_a_reservation_waits_for_copies_that_are_under_way(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[None]]
) -> None:
    """What is being backed up cannot leave yet; it is waited for, not taken for a full pool."""
    rig = make_rig(device=8, host=16, stepped=True)
    rig.serve(t(32))
    assert rig.to_host.num_pending == 1
    lease = rig.cache.match(t(132, 101))
    reserving = aside(lease.reserve, 32)
    assert not reserving.done()
    with rig.stepping():
        reserving.result(PATIENCE_S)
    lease.abandon()
    rig.check_idle()
    assert rig.cache.probe(t(33)).source.host == 32


def test_a_reservation_gives_up_when_its_time_is_over(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=8, host=16, stepped=True, policy__wait_limit="50ms")
    rig.serve(t(32))
    with rig.cache.match(t(132, 101)) as lease, pytest.raises(CapacityError, match="8 of full"):
        lease.reserve(32)
    rig.step_all()
    rig.check_idle()


class WatchedCore:
    """A core that counts how often a lease's slots are copied."""

    def __init__(self, core: TreeCore) -> None:
        self._core = core
        self.num_copies = 0

    def __getattr__(self, name: str) -> Any:  # Any: as the core has it
        self.num_copies += name == "lease_slots"
        return getattr(self._core, name)


@pytest.mark.parametrize("has_time", [True, False], ids=["waits", "gives up"])
def test_what_a_lease_holds_is_counted_for_its_error_and_for_no_wait(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """It copies as many slots as the request is long, with the tree locked."""
    rig = make_rig(device=8, host=16, stepped=True)
    rig.serve(t(32))
    lease = rig.cache.match(t(132, 101))
    runtime = rig.cache._runtime
    core = WatchedCore(runtime.core)
    rounds: list[float] = []

    def have_ended(_: object, limit_s: float) -> bool:
        rounds.append(limit_s)
        if len(rounds) == 3:
            rig.step_all()
        return has_time or len(rounds) < 3

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "core", core)
        patch.setattr(runtime, "have_ended", have_ended)
        with contextlib.nullcontext() if has_time else pytest.raises(CapacityError, match="8 of full"):
            lease.reserve(32)
    assert len(rounds) == 3
    assert core.num_copies == (0 if has_time else 1)
    lease.abandon()
    rig.check_idle()


def test_a_reset_during_the_last_wait_of_a_reservation_leaves_its_error(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(device=8, host=16, stepped=True)
    rig.serve(t(32))
    with rig.cache.match(t(132, 101)) as lease:
        lease.load()
        lease_id = lease.id

        def reset_meanwhile(*_: object) -> bool:
            monkeypatch.undo()
            rig.step_all()
            rig.cache.reset()
            return False

        monkeypatch.setattr(rig.cache._runtime, "have_ended", reset_meanwhile)
        with pytest.raises(CapacityError, match="8 of full") as caught:
            lease.reserve(32)
        assert (caught.value.required_slots, caught.value.free_slots) == (8, 0)
        with pytest.raises(ProtocolError, match=f"lease {lease_id} has ended or is from before a reset"):
            lease.reserve(32)
    rig.check_idle()
