from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hicache
from hicache.clock import ManualClock
from hicache.errors import ProtocolError, TierTimeoutError, TierUnavailableError
from hicache.testing.transfer_rig import PATIENCE_S, engine_threads
from hicache.transfer import io_loop
from hicache.transfer.io_loop import IoLoop


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    with IoLoop() as loop:
        yield loop


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


class Endless:
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def test_run_gives_the_result(loop: IoLoop) -> None:
    assert loop.run(answer(), PATIENCE_S) == 42
    assert loop.submit(answer()).result(PATIENCE_S) == 42


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("theirs")], ids=repr)
def test_what_a_coroutine_raises_reaches_its_caller_and_the_loop_lives(
    loop: IoLoop, error: Exception
) -> None:
    with pytest.raises(type(error), match=str(error)):
        loop.run(fail(error), PATIENCE_S)
    assert loop.run(answer(), PATIENCE_S) == 42


def test_a_callback_that_raises_does_not_end_the_loop(loop: IoLoop) -> None:
    def bad() -> None:
        raise ValueError("bad")

    loop.call_soon(bad)
    assert loop.run(answer(), PATIENCE_S) == 42


def test_a_run_that_takes_too_long_is_cancelled(loop: IoLoop) -> None:
    endless = Endless()
    with pytest.raises(TierTimeoutError):
        loop.run(endless.run(), 0.0)
    assert loop.run(answer(), PATIENCE_S) == 42


def test_cancelling_the_future_cancels_the_coroutine(loop: IoLoop) -> None:
    endless = Endless()
    future = loop.submit(endless.run())
    assert endless.begun.wait(PATIENCE_S)
    future.cancel()
    assert endless.cancelled.wait(PATIENCE_S)


def test_close_cancels_what_runs_and_leaves_no_thread() -> None:
    before = engine_threads()
    loop = IoLoop()
    endless = Endless()
    future = loop.submit(endless.run())
    assert endless.begun.wait(PATIENCE_S)
    loop.close()
    loop.close()
    assert endless.cancelled.is_set()
    assert future.cancelled()
    assert engine_threads() == before


def test_close_does_not_wait_for_ever_for_a_coroutine_that_ignores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_loop, "CLOSE_GRACE_S", 0.01)
    before = engine_threads()
    begun = threading.Event()

    async def stubborn() -> None:
        while True:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    loop = IoLoop()
    loop.submit(stubborn())
    assert begun.wait(PATIENCE_S)
    loop.close()
    loop._thread.join(PATIENCE_S)
    assert engine_threads() == before


def test_a_closed_loop_takes_nothing() -> None:
    loop = IoLoop()
    loop.close()
    with pytest.raises(TierUnavailableError):
        loop.run(answer(), PATIENCE_S)
    loop.call_soon(lambda: None)
    loop.wake()


def test_waiting_for_the_loop_from_the_loop_is_refused(loop: IoLoop) -> None:
    async def waits_for_itself() -> int:
        return loop.run(answer(), PATIENCE_S)

    with pytest.raises(ProtocolError, match="never end"):
        loop.run(waits_for_itself(), PATIENCE_S)


def test_advancing_a_manual_clock_makes_a_timer_due() -> None:
    clock = ManualClock()
    sleeping = threading.Event()

    async def sleep_an_hour() -> str:
        asyncio.get_running_loop().call_soon(sleeping.set)
        await asyncio.sleep(3600)
        return "awake"

    with IoLoop(clock) as loop:
        future = loop.submit(sleep_an_hour())
        assert sleeping.wait(PATIENCE_S)
        assert not future.done()
        clock.advance(3600)
        loop.wake()
        assert future.result(PATIENCE_S) == "awake"


LOOKS_UP_AT_EXIT = """
import asyncio, atexit
from hicache.transfer.io_loop import IoLoop

async def look_up():
    return bool(await asyncio.get_running_loop().getaddrinfo("localhost", 80))

loop = IoLoop()
atexit.register(lambda: print(loop.run(look_up(), 60)))
"""


def test_names_are_looked_up_until_the_process_has_ended() -> None:
    """A store's server that has to be connected anew by then; asyncio's own threads have ended."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_UP_AT_EXIT],
        cwd=Path(hicache.__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("True", "")
