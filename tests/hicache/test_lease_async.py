"""``amatch`` and ``aload``: the same request inside a running loop, which goes on turning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from hicache.errors import ProtocolError

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


async def turning(
    waiting: Coroutine[Any, Any, object], release: Callable[[], object]
) -> object:  # Any: unused
    """Start a coroutine, see the loop turn a hundred times while it waits, release it, give its result."""
    task = asyncio.ensure_future(waiting)
    for _ in range(100):
        await asyncio.sleep(0)
        assert not task.done()
    release()
    return await task


def stored(make_rig: MakeRig, tokens: Tokens, model: str = EVERY) -> Rig:
    """A rig whose L3, and nothing else, has ``tokens``."""
    rig = make_rig(model, host=64, store="scripted")
    rig.serve(tokens)
    assert rig.cache.drain()
    rig.cache.reset()
    return rig


def test_an_async_request_does_what_a_sync_one_does(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, host=64, store="scripted")

    async def serve(tokens: Tokens) -> int:
        async with await rig.cache.amatch(tokens, session="chat") as lease:
            await lease.aload()
            assert rig.wrong_pages(lease, tokens) == 0
            lease.reserve(len(tokens) - lease.reused)
            rig.write(lease, tokens, lease.reused, len(tokens))
            lease.release(tokens)
            return lease.reused

    assert asyncio.run(serve(t(20))) == 0
    rig.check_idle()
    assert asyncio.run(serve(t(30))) == 20
    rig.cache.drain()
    rig.cache.reset()
    assert asyncio.run(serve(t(21))) == 20
    rig.check_idle()


def test_amatch_lets_the_loop_turn_while_the_store_thinks(make_rig: MakeRig, t: T) -> None:
    rig = stored(make_rig, t(20))
    gate = rig.store.block("exists")

    async def serve() -> None:
        lease = await turning(rig.cache.amatch(t(21)), gate.release)
        assert (await lease.aload()) == 20  # type: ignore[attr-defined]  # turning gives what amatch gives
        lease.abandon()  # type: ignore[attr-defined]  # as above

    asyncio.run(serve())
    rig.check_idle()


def test_aload_lets_the_loop_turn_while_the_store_reads(make_rig: MakeRig, t: T) -> None:
    rig = stored(make_rig, t(20))
    gate = rig.store.block("get")

    async def serve() -> None:
        async with await rig.cache.amatch(t(21)) as lease:
            assert await turning(lease.aload(), gate.release) == 20
            assert rig.wrong_pages(lease, t(21)) == 0

    asyncio.run(serve())
    rig.check_idle()


def test_aload_lets_the_loop_turn_while_copies_run(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, stepped=True)
    rig.serve_stepped(t(20))
    rig.squeeze_stepped()

    async def serve() -> None:
        async with await rig.cache.amatch(t(21)) as lease:
            loading = asyncio.ensure_future(lease.aload())
            while not loading.done():
                await asyncio.sleep(0)
                rig.to_device.step()
                rig.local.step()
            assert (await loading, lease.source.host) == (20, 20)

    asyncio.run(serve())
    rig.step_all()
    rig.check_idle()


def test_many_requests_on_one_loop_wait_for_one_fetch(make_rig: MakeRig, t: T) -> None:
    """O-69 in async code: one read of each page, all are served."""
    rig = stored(make_rig, t(40), "full")
    gate = rig.store.block("get")

    async def one(last: int) -> int:
        async with await rig.cache.amatch([*t(40), last]) as lease:
            return await lease.aload()

    async def serve() -> list[int]:
        tasks = [asyncio.ensure_future(one(last)) for last in range(20)]
        await asyncio.to_thread(gate.reached.wait, 20)
        gate.release()
        return await asyncio.gather(*tasks)

    assert asyncio.run(serve()) == [40] * 20
    assert len(rig.store.keys_of("get")) == 10
    rig.check_idle()


@pytest.mark.parametrize("operation", ["exists", "get"])
def test_a_cancelled_request_holds_nothing(make_rig: MakeRig, t: T, operation: str) -> None:
    rig = stored(make_rig, t(20))
    gate = rig.store.block(operation)  # type: ignore[arg-type]  # the two parametrized names

    async def serve() -> None:
        async with await rig.cache.amatch(t(21)) as lease:
            await lease.aload()

    async def cancel() -> None:
        task = asyncio.ensure_future(serve())
        assert await asyncio.to_thread(gate.reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    rig.store.release()
    rig.check_idle()
    assert rig.serve(t(21)).source.total == 20


def test_async_with_gives_everything_back_on_an_exception(make_rig: MakeRig, t: T) -> None:
    rig = stored(make_rig, t(20))

    async def serve() -> None:
        async with await rig.cache.amatch(t(21)) as lease:
            await lease.aload()
            lease.reserve(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(serve())
    rig.check_idle()


def test_async_with_is_quiet_after_release_reset_and_close(make_rig: MakeRig, t: T) -> None:
    rig = stored(make_rig, t(20))

    async def serve(end: Callable[[], object] | None) -> None:
        async with await rig.cache.amatch(t(21)) as lease:
            await lease.aload()
            if end is None:
                lease.release()
            else:
                end()

    asyncio.run(serve(None))
    rig.check_idle()
    asyncio.run(serve(rig.cache.reset))
    rig.check_idle()
    asyncio.run(serve(rig.cache.close))


def test_aload_of_a_released_lease_is_refused(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()

    async def serve() -> None:
        lease = await rig.cache.amatch(t(4))
        lease.release()
        await lease.aload()

    with pytest.raises(ProtocolError, match="released already"):
        asyncio.run(serve())


def test_amatch_refuses_what_match_refuses(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()
    with pytest.raises(ValueError, match="position 1"):
        asyncio.run(rig.cache.amatch([1, -2]))
    rig.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        asyncio.run(rig.cache.amatch(t(4)))
