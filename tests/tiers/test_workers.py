"""A store's threads: shares end before the call does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hicache.tiers.workers import Workers


def test_the_first_error_is_raised_after_all_shares_have_ended() -> None:
    may_end = threading.Event()
    ended: list[str] = []

    def fail() -> None:
        ended.append("failed")
        may_end.set()
        raise RuntimeError("a share failed")

    def wait() -> None:
        assert may_end.wait(timeout=30)
        ended.append("waited")

    async def test() -> None:
        workers = Workers(2, name="test")
        with pytest.raises(RuntimeError, match="a share failed"):
            await workers.run([fail, wait], threading.Event())
        assert sorted(ended) == ["failed", "waited"]
        workers.close()

    asyncio.run(test())


def test_a_cancelled_call_sets_stop_and_ends_after_its_shares() -> None:
    started, stop = threading.Event(), threading.Event()
    ended: list[bool] = []

    def share() -> None:
        started.set()
        assert stop.wait(timeout=30)
        ended.append(True)

    async def test() -> None:
        workers = Workers(1, name="test")
        call = asyncio.create_task(workers.run([share, share], stop))
        assert await asyncio.to_thread(started.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended == [True, True]
        workers.close()

    asyncio.run(test())


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        Workers(0, name="test")
