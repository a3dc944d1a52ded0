"""How long each call of a tree core takes on a long prompt, and how long it keeps other threads waiting.

    python benchmarks/tree_gil.py [--tokens 131072] [--page-size 1] [--core rust] [--store]

``whole`` is the call's thread CPU time: no call can hold the GIL for longer. ``held`` is the longest time for
which another thread, which does nothing but look at the clock, did not get the GIL meanwhile. Both are the best
of all passes, since other processes on the machine can only add to them.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hicache.radix.core import make_core
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.types import ComponentSpec, Tier

T = TypeVar("T")


class Watch(threading.Thread):
    """A thread that wants the GIL all the time and notes the longest it had to wait for it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = self.seen_s = 0.0
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - self.seen_s)
            self.seen_s = now


class Gauge:
    """Times calls; keeps the best of each."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.whole_us: dict[str, float] = defaultdict(lambda: float("inf"))
        self.held_us: dict[str, float] = defaultdict(lambda: float("inf"))

    def time(self, name: str, call: Callable[[], T]) -> T:
        if self.watch is None:
            begun = time.thread_time_ns()
            result = call()
            self.whole_us[name] = min(self.whole_us[name], (time.thread_time_ns() - begun) / 1000)
            return result
        watch = self.watch
        begun = watch.seen_s = time.perf_counter()
        watch.longest_s = 0.0
        result = call()
        held_s = max(watch.longest_s, time.perf_counter() - max(begun, watch.seen_s))
        self.held_us[name] = min(self.held_us[name], 1e6 * held_s)
        return result


def restore(core: TreeCore, gauge: Gauge, tokens: np.ndarray) -> None:
    """Bring a prompt that only L3 has to L1, once L2 and L1 have room for it."""
    time_call = gauge.time

    def commit(*names: str) -> None:
        for name in names:
            (ticket,) = core.in_flight()
            time_call(name, lambda: core.commit(ticket))

    commit("commit of a backup", "commit of a store")
    for tier in (Tier.DEVICE, Tier.HOST):
        core.make_room("full", tier, len(tokens) // core.config.page_size)
    lease = core.match(tokens, cap=False).lease
    time_call("plan", lambda: core.plan(lease))
    time_call("fetch", lambda: core.fetch(lease))
    commit("commit of a fetch")
    time_call("load", lambda: core.load(lease))
    commit("commit of a load")
    time_call("settle", lambda: core.settle(lease))
    core.release(lease)


def serve(core: TreeCore, gauge: Gauge, tokens: np.ndarray, *, has_store: bool) -> None:
    """A prompt that nobody sent before, sent again, continued, and dropped; then the tree is as new."""
    time_call = gauge.time
    lease = time_call("match of nothing known", lambda: core.match(tokens, cap=False)).lease
    time_call("reserve", lambda: core.reserve(lease, len(tokens)))
    time_call("insert of all of it", lambda: core.insert(lease, tokens))
    time_call("lease_slots", lambda: core.lease_slots(lease, "full"))
    time_call("release", lambda: core.release(lease))
    lease = time_call("match", lambda: core.match(tokens, cap=False)).lease
    time_call("release of all that is known", lambda: core.release(lease, tokens))
    wide = tokens.astype(np.int64)
    core.release(time_call("match, int64", lambda: core.match(wide, cap=False)).lease)
    time_call("probe", lambda: core.probe(tokens))
    if has_store:
        other = (tokens + 1).astype(np.int32)
        query = time_call("store_query", lambda: core.store_query(other))
        answers = {
            name: dict.fromkeys((index for index, _ in keys), True) for name, keys in query.keys.items()
        }
        time_call("learn", lambda: core.learn(other, answers))
        restore(core, gauge, other)
    time_call("audit", core.audit)
    time_call("pool_count", lambda: core.pool_count("full", Tier.DEVICE))
    time_call("counters", core.counters)
    time_call("snapshot", core.snapshot)
    time_call("make_room of all of it", lambda: core.make_room("full", Tier.DEVICE, len(tokens)))
    time_call("reset", core.reset)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--core", default="rust", choices=["rust", "python"])
    parser.add_argument(
        "--store", action="store_true", help="with an L3 to ask, through an L2 as large as L1"
    )
    args = parser.parse_args()
    pages = args.tokens // args.page_size
    tokens = np.random.default_rng(0).integers(0, 128_000, pages * args.page_size).astype(np.int32)
    host = {"full": pages} if args.store else {}
    spec = ComponentSpec("full", bytes_per_token=8)
    config = TreeConfig(args.page_size, (spec,), {"full": pages}, host, has_store=args.store)
    core, gauge = make_core(config, args.core), Gauge()
    for _ in range(args.passes):
        serve(core, gauge, tokens, has_store=args.store)
    sys.setswitchinterval(1e-6)  # the other thread asks for the GIL at once
    gauge.watch = Watch()
    gauge.watch.start()
    for _ in range(args.passes):
        serve(core, gauge, tokens, has_store=args.store)
    gauge.watch.is_over = True
    gauge.watch.join()
    sys.stdout.write(f"{args.core}, {args.tokens} tokens, page {args.page_size}: us\n")
    for name, whole_us in gauge.whole_us.items():
        sys.stdout.write(f"{name:32} whole {whole_us:9.1f}  held {gauge.held_us[name]:9.1f}\n")


if __name__ == "__main__":
    main()
