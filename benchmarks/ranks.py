"""What agreeing costs: exchanges, bytes and microseconds, for processes on this machine over gloo.

::

    .venv/bin/python benchmarks/ranks.py [--ranks 2] [--requests 300] [--repeat 5]

Each rank serves the same requests on a cache of its own, alone and in a group by turns; the best of the rounds
counts. On a machine that does other things a rank waits for the other to get a core: the fastest tenth says what an
exchange takes, the median what it took there. Nothing is computed, so that the share of an agreement is the largest it can be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.ranks.gloo import GlooGroup
from hicache.ranks.group import RankGroup
from hicache.testing.redis_server import free_port

TIMEOUT_S = 120.0
PROMPT_TOKENS = 8192
PAGE = 64


def settings(ranks: dict[str, int], device_pages: int) -> dict[str, Any]:
    return {
        "model": {
            "name": "bench",
            "page_size": PAGE,
            "components": {"full": {"rule": "path", "layers": 1, "bytes_per_token": 16}},
        },
        "ranks": ranks,
        "tiers": {
            "device": {"kind": "cpu", "capacity_per_rank": device_pages * PAGE * 16},
            "host": {"pinned": False, "capacity_per_rank": "64MiB"},
        },
        "policy": {"write": "write_through"},
    }


def requests_us(cache: HiCache, count: int, sessions: int) -> tuple[float, float]:
    """Microseconds of the fastest tenth and of the median: turns of several sessions that each grow by a page."""
    taken = []
    for number in range(count):
        session, turn = number % sessions, number // sessions
        length = PROMPT_TOKENS + (turn + 1) * PAGE
        tokens = np.arange(length, dtype=np.int32) + session * 1_000_000
        began_s = time.perf_counter()
        with cache.match(tokens, session=f"s{session}") as lease:
            lease.load()
            lease.reserve(length - lease.reused)
            lease.release(tokens)
        taken.append(1e6 * (time.perf_counter() - began_s))
    taken.sort()
    return taken[count // 10], taken[count // 2]


def exchange_us(group: RankGroup, numbers: int, count: int = 300) -> tuple[float, float]:
    """The fastest tenth and the median of one exchange, in microseconds."""
    taken = []
    for _ in range(count):
        values = np.zeros(numbers, dtype=np.int64)
        began_s = time.perf_counter()
        group.lowest(values)
        taken.append(1e6 * (time.perf_counter() - began_s))
    taken.sort()
    return taken[count // 10], taken[count // 2]


def run_rank(address: str, rank: int, size: int, requests: int, repeat: int) -> dict[str, object]:
    group = GlooGroup.connect(address, rank=rank, size=size, timeout_s=TIMEOUT_S)
    report: dict[str, object] = {
        f"exchange of {numbers * 8} bytes, us (fastest tenth, median)": exchange_us(group, numbers)
        for numbers in (64, 1024)
    }
    for name, device_pages, sessions in (("in L1", 4096, 8), ("from L2", 400, 8)):
        alone_us, agreed_us = [], []
        stats = None
        for _ in range(repeat):
            with HiCache(load_config(settings({}, device_pages), environ={}), background=False) as cache:
                alone_us.append(requests_us(cache, requests, sessions))
            ranks = {"tp_size": size, "tp_rank": rank}
            kept = Kept(group)
            with HiCache(load_config(settings(ranks, device_pages), environ={}), group=kept) as cache:
                before = cache.agreement_stats()
                agreed_us.append(requests_us(cache, requests, sessions))
                after = cache.agreement_stats()
                stats = (
                    (after.num_calls - before.num_calls) / requests,
                    (after.num_bytes - before.num_bytes) / requests,
                    cache.stats().tokens.hit_rate,
                )
        report[name] = {
            "alone, us a request (fastest tenth, median)": best(alone_us),
            "in the group, us a request (fastest tenth, median)": best(agreed_us),
            "exchanges and bytes a request; hit rate (last round)": [round(each, 3) for each in stats or ()],
        }
    group.close()
    return report


def best(rounds: list[tuple[float, float]]) -> list[float]:
    """Of each column the lowest of all rounds."""
    return [round(min(column), 1) for column in zip(*rounds, strict=True)]


class Kept:
    """A group that outlives the caches that close it."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size, self.lowest = group.rank, group.size, group.lowest

    def close(self) -> None:
        """Kept open."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        report = run_rank(options.address, options.as_rank, options.ranks, options.requests, options.repeat)
        if options.as_rank == 0:
            print(json.dumps(report, indent=2))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--address", f"127.0.0.1:{free_port()}", "--as-rank"]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(options.ranks)]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
