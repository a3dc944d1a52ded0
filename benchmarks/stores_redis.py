"""The Redis store against a bare pipelined client, on the same values and the same server, in one run.

    python benchmarks/stores_redis.py [--url redis://host] [--tls] [--mib 256] [--rounds 5]

Without ``--url`` it starts a ``redis-server`` of its own on loopback, with ``--tls`` one that speaks TLS only. Both clients run in this process, on
the same kind of event loop, and take turns. *Bare* is ``redis.asyncio``'s pipeline with hiredis: ``SET`` and
``GET`` of plain values, nothing checked, nothing copied anywhere. *Store* is ``RedisStore``: framed, hashed,
compared with what was asked, and read into the caller's buffers.

Throughput is of batches as the transfer engine makes them (at most 64 pages and 16 MiB), the median of all
rounds; latency is of calls with one page.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from redis.asyncio import Redis

from hicache.config.redis_url import parse_redis_url
from hicache.testing.redis_server import RedisServer, make_certificates
from hicache.testing.store_pages import make_key
from hicache.tiers.redis import RedisStore
from hicache.tiers.store import PageTarget, StoredPage

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
BATCH_PAGES = 64
BATCH_BYTES = 16 << 20
SINGLE_CALLS = 200
TARGET = 0.8

Step = Callable[[int, int], Awaitable[None]]
"""Handles pages from one to before the other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a server to use; its database is written to")
    parser.add_argument("--tls", action="store_true", help="the server of its own speaks TLS")
    parser.add_argument("--mib", type=int, default=128, help="payload of one round, MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url, ca_file = arguments.url, None
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            certificates = make_certificates(folder) if arguments.tls else None
            ca_file = None if certificates is None else str(certificates.ca_file)
            url = stack.enter_context(RedisServer(folder, certificates=certificates)).url
        print(f"{url}, {arguments.mib} MiB a round, {arguments.rounds} rounds, {os.cpu_count()} CPUs")
        print(
            f"{'page':>8} {'':>6} {'bare':>18} {'store':>18} {'ratio':>6}   p50/p99 us of one page: bare, store"
        )
        for size in SIZES:
            asyncio.run(measure(url, ca_file, size, arguments.mib << 20, arguments.rounds))


async def measure(url: str, ca_file: str | None, size: int, total_bytes: int, rounds: int) -> None:
    """Print both directions for one size of page."""
    parsed = parse_redis_url(url)
    host, port = parsed.endpoints[0]
    client = Redis(host=host, port=port, protocol=2, ssl=parsed.tls, ssl_ca_certs=ca_file)
    store = RedisStore(url, prefix="bench", timeout_s=30.0, ca_file=ca_file)
    await store.open()
    num_pages = total_bytes // size
    payloads = [os.urandom(size) for _ in range(num_pages)]
    pages = [StoredPage(make_key(n), None, "full", memoryview(p)) for n, p in enumerate(payloads)]
    targets = [PageTarget(page.key, "full", memoryview(bytearray(size))) for page in pages]
    for target in targets:
        target.payload[:] = bytes(size)  # touched: no page fault is measured
    names = [f"bare:{n}" for n in range(num_pages)]
    step = max(1, min(BATCH_PAGES, BATCH_BYTES // size))

    async def bare_write(first: int, last: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for name, payload in zip(names[first:last], payloads[first:last], strict=True):
            pipeline.set(name, payload)
        assert all(await pipeline.execute())

    async def bare_read(first: int, last: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for name in names[first:last]:
            pipeline.get(name)
        assert all(map(len, await pipeline.execute()))

    async def store_write(first: int, last: int) -> None:
        assert all(await store.put(pages[first:last]))

    async def store_read(first: int, last: int) -> None:
        assert all(await store.get(targets[first:last]))

    for title, bare, ours in (("write", bare_write, store_write), ("read", bare_read, store_read)):
        speeds: dict[str, list[float]] = {"bare": [], "store": []}
        calls: dict[str, list[float]] = {"bare": [], "store": []}
        for n in range(rounds + 1):  # the first one warms up
            order = (("bare", bare), ("store", ours)) if n % 2 else (("store", ours), ("bare", bare))
            for name, run in order:
                seconds = await batches(run, 0, num_pages, step)
                if n:
                    speeds[name].append(total_bytes / seconds / 1e9)
        for n in range(SINGLE_CALLS):
            first = n % num_pages
            for name, run in (("bare", bare), ("store", ours)):
                calls[name].append(1e6 * await batches(run, first, first + 1, 1))
        report(size, title, speeds, calls)
    assert [bytes(target.payload) for target in targets] == payloads
    await store.clear()
    await client.unlink(*names)
    await store.close()
    await client.aclose()


async def batches(run: Step, first: int, last: int, step: int) -> float:
    """Seconds for pages ``first .. last - 1``, batch after batch."""
    began = time.perf_counter()
    for begin in range(first, last, step):
        await run(begin, min(begin + step, last))
    return time.perf_counter() - began


def report(size: int, title: str, speeds: dict[str, list[float]], calls: dict[str, Sequence[float]]) -> None:
    def speed(name: str) -> str:
        low, high = min(speeds[name]), max(speeds[name])
        return f"{statistics.median(speeds[name]):5.2f} ({low:.2f}-{high:.2f})"

    def latency(name: str) -> str:
        cuts = statistics.quantiles(calls[name], n=100)
        return f"{cuts[49]:.0f}/{cuts[98]:.0f}"

    ratio = statistics.median(speeds["store"]) / statistics.median(speeds["bare"])
    mark = "" if ratio >= TARGET else f"  below {TARGET:.0%}"
    print(
        f"{size >> 10:>5}KiB {title:>6} {speed('bare'):>18} {speed('store'):>18} {ratio:>6.0%}"
        f"   {latency('bare')}, {latency('store')}{mark}",
        flush=True,
    )


if __name__ == "__main__":
    main()
