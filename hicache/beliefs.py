"""What is believed of L3, and how that is given up."""

from __future__ import annotations

from hicache.runtime import Runtime
from hicache.stores import StoreSet


def forget_beliefs(runtime: Runtime, stores: StoreSet) -> None:
    """Believe of no page that L3 has it, nor any answer that is on its way (lock held).

    *Caller guarantees*: no write that may have gone into what has left is under way.
    """
    runtime.core.forget_store()
    runtime.tell()
    stores.must_ask = True
    stores.epoch += 1


def distrust(runtime: Runtime, stores: StoreSet) -> None:
    """The same where pages have left L3 beside requests: part of what is being written may have left, too.

    Those writes are waited for, bounded; what runs on then has failed, whatever it reports.
    """
    with runtime.lock:
        running = runtime.store_tickets()
    runtime.wait(running, runtime.wait_limit_s)
    with runtime.lock:
        runtime.doom(running)
        forget_beliefs(runtime, stores)
