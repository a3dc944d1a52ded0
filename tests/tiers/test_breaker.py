"""The breaker: the store behind it keeps the contract; when it opens, probes and closes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hicache.clock import ManualClock
from hicache.errors import ProtocolError, TierTimeoutError, TierUnavailableError
from hicache.testing.scripted_store import MISS, Raise, ScriptedStore
from hicache.testing.store_contract import StoreContract
from hicache.testing.store_pages import Corruption, make_chain, make_key, make_page, make_target, spoil
from hicache.tiers.breaker import PROBE_KEY, Breaker, BreakerSettings, BreakerStore
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import BreakerState, Store, StoredPage
from hicache.types import PageKey, Regard

SETTINGS = BreakerSettings(
    failures=3, slow_s=1.0, slow_fraction=0.5, window=4, backoff_s=10.0, backoff_max_s=35.0, jitter=0.0
)
ILL = Raise(TierUnavailableError("ill"))


class TestBreakerStore(StoreContract):
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = BreakerStore(MemoryStore(capacity_bytes), clock=ManualClock(), randomness=random.Random(1))
        await store.open()
        return store

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        raw = self.medium(store).raw(key)
        return None if raw is None else bytes(raw)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        raw = self.medium(store).raw(key)
        assert raw is not None
        spoilt = spoil(bytes(raw), how)
        if spoilt is None:
            del self.medium(store)._blobs[key]
        else:
            raw[:] = spoilt

    @staticmethod
    def medium(store: Store) -> MemoryStore:
        assert isinstance(store, BreakerStore)
        assert isinstance(store.inner, MemoryStore)
        return store.inner


class Rig:
    """A breaker in front of a scripted store, with one page in it."""

    def __init__(self, settings: BreakerSettings = SETTINGS, *, must_open: bool = True) -> None:
        self.clock = ManualClock()
        self.inner = ScriptedStore()
        self.store = BreakerStore(
            self.inner, settings, clock=self.clock, randomness=random.Random(1), must_open=must_open
        )
        self.page: StoredPage = make_page("a")

    def state(self) -> BreakerState:
        breaker = self.store.stats().breaker
        assert breaker is not None
        return breaker.state

    async def get(self) -> bool:
        (answer,) = await self.store.get([make_target(self.page.key)])
        return answer

    async def fail(self, times: int) -> None:
        for _ in range(times):
            with pytest.raises(TierUnavailableError):
                await self.get()

    async def probe(self) -> None:
        """The call that starts a probe, and the probe."""
        assert await self.get() is False
        await self.store.settled()

    @property
    def num_probes(self) -> int:
        return self.inner.keys_of("exists").count(PROBE_KEY)


def run(
    test: Callable[[Rig], Coroutine[Any, Any, None]],  # Any: asyncio's
    rig: Rig | None = None,
) -> None:
    async def main() -> None:
        rigged = rig or Rig()
        await rigged.store.open()
        await rigged.store.put([rigged.page])
        try:
            await test(rigged)
        finally:
            await rigged.store.close()

    asyncio.run(asyncio.wait_for(main(), timeout=120))


def test_it_opens_after_so_many_failures_in_a_row_and_then_asks_the_store_nothing() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL)
        await rig.fail(2)
        assert rig.state() is BreakerState.CLOSED
        await rig.fail(1)
        assert rig.state() is BreakerState.OPEN
        num_calls = len(rig.inner.calls)
        assert await rig.get() is False
        assert await rig.store.exists([rig.page.key, make_key("b")]) == [False, False]
        assert await rig.store.put(make_chain(1, 2)) == [False, False]
        assert len(rig.inner.calls) == num_calls
        stats = rig.store.stats()
        assert stats.breaker is not None
        assert (stats.breaker.num_opened, stats.breaker.num_rejected) == (1, 3)
        assert stats.breaker.retry_in_s == 10.0
        assert stats.breaker.reason == "3 calls failed in a row, at last: ill"
        assert (stats.pages_missed, stats.pages_refused) == (1, 2)

    run(test)


def test_a_good_call_between_failures_starts_the_count_anew() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL)
        await rig.fail(2)
        assert await rig.store.exists([rig.page.key]) == [True]
        await rig.fail(2)
        assert rig.state() is BreakerState.CLOSED

    run(test)


def test_misses_alone_never_open_it() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", MISS)
        for _ in range(20):
            assert await rig.get() is False
        assert rig.state() is BreakerState.CLOSED

    run(test)


def test_misses_with_errors_counted_by_the_store_open_it() -> None:
    """A disk whose every read ends in EIO raises nothing: it answers with misses."""

    async def test(rig: Rig) -> None:
        for _ in range(3):
            wrong = make_target(rig.page.key, component="another")  # counted as an error of its own
            assert await rig.store.get([wrong]) == [False]
        assert rig.state() is BreakerState.OPEN

    run(test)


def test_a_callers_mistake_is_not_the_stores_failure() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", Raise(ProtocolError("misuse")))
        for _ in range(5):
            with pytest.raises(ProtocolError):
                await rig.get()
        assert rig.state() is BreakerState.CLOSED

    run(test)


def test_it_probes_once_the_back_off_is_over_and_closes_by_itself() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL, times=3)
        await rig.fail(3)
        rig.clock.advance(9.9)
        await rig.probe()
        assert (rig.state(), rig.num_probes) == (BreakerState.OPEN, 0)
        rig.clock.advance(0.1)
        await rig.probe()
        assert (rig.state(), rig.num_probes) == (BreakerState.CLOSED, 1)
        assert await rig.get() is True

    run(test)


def test_nobody_waits_for_a_probe_and_there_is_only_one() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL, times=3)
        await rig.fail(3)
        gate = rig.inner.block("exists", key=PROBE_KEY)
        rig.clock.advance(10)
        for _ in range(3):
            assert await rig.get() is False
            await asyncio.sleep(0)
        assert (rig.state(), rig.num_probes) == (BreakerState.PROBING, 1)
        gate.release()
        await rig.store.settled()
        assert rig.state() is BreakerState.CLOSED

    run(test)


def test_each_failed_probe_doubles_the_back_off_up_to_its_limit() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL)
        rig.inner.script("exists", ILL)
        await rig.fail(3)
        waits = []
        for _ in range(4):
            breaker = rig.store.stats().breaker
            assert breaker is not None
            assert breaker.retry_in_s is not None
            waits.append(breaker.retry_in_s)
            rig.clock.advance(breaker.retry_in_s)
            await rig.probe()
        assert waits == [10.0, 20.0, 35.0, 35.0]
        assert rig.state() is BreakerState.OPEN

    run(test)


def test_a_store_that_fails_again_soon_waits_longer_and_one_that_was_well_does_not() -> None:
    clock = ManualClock()
    breaker = Breaker(SETTINGS, clock=clock, randomness=random.Random(1))

    def relapse(num_good: int) -> float | None:
        breaker.trip("ill")
        wait_s = breaker.stats().retry_in_s
        clock.advance(100)
        assert breaker.begin_probe()
        breaker.end_probe(0.1)
        for _ in range(num_good):
            breaker.succeeded(0.1)
        return wait_s

    assert [relapse(3), relapse(4), relapse(0)] == [10.0, 20.0, 10.0]


def test_the_back_off_is_longer_by_a_random_share() -> None:
    settings = BreakerSettings(backoff_s=10.0, jitter=0.5)
    clock = ManualClock()
    waits = []
    for seed in range(20):
        breaker = Breaker(settings, clock=clock, randomness=random.Random(seed))
        breaker.trip("ill")
        wait_s = breaker.stats().retry_in_s
        assert wait_s is not None
        waits.append(wait_s)
    assert len(set(waits)) == 20
    assert all(10.0 <= wait_s <= 15.0 for wait_s in waits)


def test_it_opens_when_more_than_the_share_of_calls_is_slow() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            gate = rig.inner.block("get", key=rig.page.key)
            call = asyncio.ensure_future(rig.get())
            await asyncio.sleep(0)
            rig.clock.advance(1.5)
            gate.release()
            assert await call is True
            rig.inner.unscript()
        # The put of the rig was quick: 3 of the last 4 calls were slow.
        assert rig.state() is BreakerState.OPEN
        breaker = rig.store.stats().breaker
        assert breaker is not None
        assert breaker.reason == "3 of 4 calls took over 1 s"

    run(test)


def test_half_the_calls_slow_is_not_more_than_half() -> None:
    clock = ManualClock()
    breaker = Breaker(SETTINGS, clock=clock, randomness=random.Random(1))
    for latency_s in (1.5, 1.5, 0.1, 0.1, 1.5, 1.5):
        breaker.succeeded(latency_s)
    assert breaker.stats().state is BreakerState.CLOSED
    breaker.succeeded(1.5)
    assert breaker.stats().state is BreakerState.OPEN


def test_a_slow_probe_does_not_close_it() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL, times=3)
        await rig.fail(3)
        gate = rig.inner.block("exists", key=PROBE_KEY)
        rig.clock.advance(10)
        assert await rig.get() is False
        await asyncio.sleep(0)
        rig.clock.advance(1.5)
        gate.release()
        await rig.store.settled()
        assert rig.state() is BreakerState.OPEN

    run(test)


@pytest.mark.parametrize(("waited_s", "state"), [(0.5, BreakerState.CLOSED), (1.5, BreakerState.OPEN)])
def test_a_call_given_up_late_has_failed_and_one_given_up_early_has_not(
    waited_s: float, state: BreakerState
) -> None:
    async def test(rig: Rig) -> None:
        rig.inner.block("get")
        for _ in range(3):
            call = asyncio.ensure_future(rig.get())
            await asyncio.sleep(0)
            rig.clock.advance(waited_s)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert rig.state() is state

    run(test)


def test_time_limits_count_as_failures() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", Raise(TierTimeoutError("late")))
        for _ in range(3):
            with pytest.raises(TierTimeoutError):
                await rig.get()
        assert rig.state() is BreakerState.OPEN

    run(test)


def test_a_deletion_that_cannot_be_done_says_so() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL)
        await rig.fail(3)
        with pytest.raises(TierUnavailableError, match="switched off: 3 calls failed"):
            await rig.store.delete([rig.page.key])

    run(test)


def test_a_hint_reaches_a_store_that_is_left_alone() -> None:
    """It costs no I/O, and may take back what would stand until the end otherwise."""

    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL)
        await rig.fail(3)
        assert rig.state() is BreakerState.OPEN
        await rig.store.hint([rig.page.key], Regard.PLAIN)
        assert rig.inner.keys_of("plain") == [rig.page.key]

    run(test)


class ShyStore(ScriptedStore):
    """Does not open until it is told to."""

    is_ready = False

    async def open(self) -> None:
        if not self.is_ready:
            raise TierUnavailableError("not there yet")
        await super().open()


@pytest.mark.parametrize("must_open", [True, False])
def test_a_store_that_does_not_open_is_refused_or_opened_by_a_probe(must_open: bool) -> None:
    async def main() -> None:
        clock, inner = ManualClock(), ShyStore()
        store = BreakerStore(
            inner, SETTINGS, clock=clock, randomness=random.Random(1), must_open=must_open, name="shared"
        )
        if must_open:
            with pytest.raises(TierUnavailableError, match="not there yet"):
                await store.open()
            return
        await store.open()
        page = make_page("a")
        assert await store.put([page]) == [False]
        inner.is_ready = True
        clock.advance(10)
        assert await store.put([page]) == [False]
        await store.settled()
        assert await store.put([page]) == [True]
        assert await store.exists([page.key]) == [True]
        stats = store.stats()
        assert stats.breaker is not None
        assert (stats.name, stats.breaker.state) == ("shared", BreakerState.CLOSED)
        await store.close()

    asyncio.run(main())


def test_closing_ends_a_probe() -> None:
    async def test(rig: Rig) -> None:
        rig.inner.script("get", ILL)
        await rig.fail(3)
        rig.inner.block("exists", key=PROBE_KEY)
        rig.clock.advance(10)
        assert await rig.get() is False
        await asyncio.sleep(0)
        await rig.store.close()
        assert rig.state() is BreakerState.OPEN
        with pytest.raises(TierUnavailableError):
            await rig.get()

    run(test)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("failures", 0),
        ("window", 0),
        ("slow_s", 0.0),
        ("backoff_s", -1.0),
        ("slow_fraction", 1.1),
        ("jitter", -0.1),
        ("backoff_max_s", 0.5),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"breaker {setting} is {value}"):
        BreakerSettings(**{setting: value})  # type: ignore[arg-type]  # int or float, as the name says
