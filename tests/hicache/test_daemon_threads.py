"""The pool whose threads work until the process has ended."""

from __future__ import annotations

import threading

import pytest

from hicache import threads
from hicache.threads import DaemonExecutor


def test_calls_run_side_by_side_on_so_many_daemons_and_errors_are_the_callers() -> None:
    both = threading.Barrier(2)
    with DaemonExecutor(2, name="pool") as pool:
        names = {future.result(60) for future in [pool.submit(_meet, both) for _ in range(2)]}
        assert names == {"pool_0", "pool_1"}
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result(60)
        assert pool.submit(_meet, threading.Barrier(1)).result(60) in names
    with pytest.raises(RuntimeError, match="pool: the threads were ended"):
        pool.submit(print)


def _meet(barrier: threading.Barrier) -> str:
    barrier.wait(60)
    assert threading.current_thread().daemon
    return threading.current_thread().name


def test_what_is_queued_is_done_before_the_end() -> None:
    done: list[int] = []
    pool = DaemonExecutor(1, name="pool")
    for number in range(20):
        pool.submit(done.append, number)
    pool.shutdown()
    pool.shutdown()
    assert done == list(range(20))


@pytest.mark.parametrize("is_said_before", [False, True], ids=["at once", "after the end was said"])
def test_what_waits_can_be_dropped(is_said_before: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    pool = DaemonExecutor(1, name="pool")

    def hold() -> bool:
        begun.set()
        return go_on.wait(60)

    running = pool.submit(hold)
    assert begun.wait(60)
    waiting = pool.submit(print)
    if is_said_before:
        pool.shutdown(wait=False)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    go_on.set()
    assert running.result(60)
    pool.shutdown()
    assert not any(thread.name == "pool_0" for thread in threading.enumerate())


def test_a_hung_call_holds_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "JOIN_TIMEOUT_S", 0.05)
    go_on = threading.Event()
    pool = DaemonExecutor(1, name="pool")
    hung = pool.submit(go_on.wait, 60)
    pool.shutdown()
    assert not hung.done()
    assert "pool_0 is still at work" in caplog.text
    go_on.set()
    assert hung.result(60)


def test_without_a_thread_the_call_is_made_by_who_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process Python 3.12 starts none, and neither does a machine that is full of them."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with DaemonExecutor(2, name="pool") as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert pool.submit(threading.get_ident).result(0) == threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                pool.submit(lambda: 1 / 0).result(0)
        assert pool.submit(threading.get_ident).result(60) != threading.get_ident()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert pool.submit(threading.get_ident).result(60) != threading.get_ident()
