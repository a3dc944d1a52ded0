"""Pages leave L3 on purpose while requests ask for them, read them and write them: nothing old is believed after that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hicache.cache import HiCache
from hicache.errors import TierUnavailableError
from hicache.testing.scripted_store import Gate, ScriptedStore
from hicache.types import Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
PATIENCE_S = 60.0
SECOND = {"kind": "memory", "name": "second", "capacity": "1MiB"}
Clear = Callable[[HiCache, "Tokens"], object]


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def store_rig(make_rig: MakeRig, **keywords: object) -> Rig:
    return make_rig("full", device=64, host=64, store="scripted", **keywords)


def seeded(make_rig: MakeRig, tokens: Tokens, **keywords: object) -> Rig:
    """L3 alone has the tokens' pages, and the tree believes it."""
    rig = store_rig(make_rig, **keywords)
    rig.seed_store(tokens)
    runtime = rig.cache._runtime
    with runtime.lock:
        runtime.core.learn(tokens, {"full": dict.fromkeys(range(len(tokens) // rig.page), True)})
    return rig


def believed(rig: Rig) -> int:
    """Slots that the tree believes to be in L3."""
    return rig.resident("full", Tier.STORE)


def poll_until(rig: Rig, gate: Gate) -> None:
    """The store has begun the call: what leads to it goes on as the cache is polled, which nobody else does."""
    until_s = time.monotonic() + PATIENCE_S
    while not gate.reached.is_set():
        rig.cache.poll()
        assert time.monotonic() < until_s


@pytest.mark.parametrize(
    "clear",
    [
        lambda cache, _: cache.admin.clear(everything=True),
        lambda cache, tokens: cache.admin.clear(tokens=tokens[:4]),
        lambda cache, _: cache.admin.detach("given"),
    ],
    ids=["everything", "a prefix", "detach"],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["match", "amatch"])
def test_an_answer_from_before_pages_left_is_none(
    make_rig: MakeRig, t: T, aside: ThreadPoolExecutor, clear: Clear, is_async: bool
) -> None:
    """The store has said that it has the pages; they leave before the request hears of it."""
    rig = seeded(make_rig, t(16))
    gate = rig.store.block("exists")
    cache, prompt = rig.cache, t(20)

    def match() -> int:
        lease = asyncio.run(cache.amatch(prompt)) if is_async else cache.match(prompt)
        with lease:
            return lease.reused

    matching = aside.submit(match)
    assert gate.reached.wait(PATIENCE_S)
    clear(cache, prompt)
    gate.release()
    assert matching.result(PATIENCE_S) == 0
    assert cache.stats().faults["probe_outdated"] == 1
    assert believed(rig) == 0
    rig.check_idle()


def test_a_page_that_waits_for_its_deletion_is_not_there(
    make_rig: MakeRig, t: T, aside: ThreadPoolExecutor
) -> None:
    """Deletions come in turn, after pages that are being written; a request may ask before."""
    rig = seeded(make_rig, t(16))
    gate = rig.store.block("put")
    rig.serve(t(132, 101))
    poll_until(rig, gate)
    clearing = aside.submit(rig.cache.admin.clear, tokens=t(4))
    while believed(rig) == 4:
        pass
    with rig.cache.match(t(20)) as lease:
        assert lease.reused == 0
    assert rig.store.inner.stats().num_pages == 4, "nothing was deleted yet"
    gate.release()
    assert clearing.result(PATIENCE_S).undeleted_pages == 0
    rig.check_idle()
    rig.check_beliefs()
    assert rig.stored(t(16)) == [False] * 4


def test_what_was_written_before_a_store_was_emptied_is_not_believed_after_it(
    make_rig: MakeRig, t: T, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's pages are put while the clear is on its way to the store, and reported after it."""
    rig = store_rig(make_rig)
    empty = rig.store.inner.clear

    def write() -> None:
        with rig.cache.match(t(17)) as lease:
            lease.load()
            lease.reserve(17)
            rig.write(lease, t(17), 0, 17)
            lease.release(t(17), written=17)
        while rig.cache._runtime.core.in_flight() and rig.store.inner.stats().num_pages < 4:
            rig.cache.poll()

    async def clear() -> int:
        await asyncio.get_running_loop().run_in_executor(aside, write)
        return await empty()

    monkeypatch.setattr(rig.store.inner, "clear", clear)
    rig.cache.admin.clear(everything=True)
    assert rig.cache.drain()
    assert believed(rig) == 0
    rig.check_beliefs()
    rig.check_idle()


def test_a_store_that_fails_to_empty_itself_is_believed_no_more(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have removed some of its pages; a request is about to read them."""
    rig = seeded(make_rig, t(16))
    gate = rig.store.block("get")

    async def clear() -> int:
        await rig.store.inner.delete(rig.keys(t(16))[2:])
        raise TierUnavailableError("half way")

    with rig.cache.match(t(20)) as lease:
        assert gate.reached.wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(rig.store.inner, "clear", clear)
            patch.setattr(rig.cache._runtime, "wait_limit_s", 0.05)
            with pytest.raises(TierUnavailableError, match="half way"):
                rig.cache.admin.clear(everything=True)
        gate.release()
        assert lease.load() <= 8
    rig.check_idle()
    rig.check_beliefs()


def test_deletions_are_done_or_counted_when_a_clear_returns(make_rig: MakeRig, t: T) -> None:
    """What is queued would be lost with a close that follows, and the pages be there after the next start."""
    store = ScriptedStore()
    rig = make_rig("full", device=64, host=64, store=store)
    rig.seed_store(t(16))
    rig.cache.match(t(20)).abandon()
    assert rig.cache.drain()
    report = rig.cache.admin.clear(tokens=t(4))
    assert report.is_complete
    assert store.inner.stats().num_pages == 0


def test_a_deletion_that_fails_is_told(make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = seeded(make_rig, t(16))

    async def delete(_: object) -> int:
        raise TierUnavailableError("away")

    monkeypatch.setattr(rig.store.inner, "delete", delete)
    report = rig.cache.admin.clear(tokens=t(4))
    assert (report.undeleted_pages, report.is_complete) == (4, False)
    assert rig.stored(t(16)) == [True] * 4


def test_a_write_that_outlives_its_time_beside_a_clear_has_failed(
    make_rig: MakeRig, t: T, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it may have been in the store before that was emptied; later it is written again."""
    rig = store_rig(make_rig)
    gate = rig.store.block("put")
    empty = rig.store.inner.clear

    def begin() -> None:
        with rig.cache.match(t(17)) as lease:
            lease.load()
            lease.reserve(17)
            rig.write(lease, t(17), 0, 17)
            lease.release(t(17), written=17)
        while not gate.reached.is_set():
            rig.cache.poll()

    async def clear() -> int:
        await asyncio.get_running_loop().run_in_executor(aside, begin)
        return await empty()

    monkeypatch.setattr(rig.store.inner, "clear", clear)
    monkeypatch.setattr(rig.cache._runtime, "wait_limit_s", 0.05)
    rig.cache.admin.clear(everything=True)
    gate.release()
    monkeypatch.setattr(rig.cache._runtime, "wait_limit_s", PATIENCE_S)
    assert rig.cache.drain()
    assert rig.cache.stats().faults["store_late"] == 1
    rig.check_beliefs()
    assert rig.cache.flush()
    assert rig.stored(t(16)) == [True] * 4
    rig.check_idle()
