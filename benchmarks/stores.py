"""Stores against what their medium gives: bytes a second, and how long one page takes.

    python benchmarks/stores.py [disk] [--path DIR] [--mib 256] [--rounds 3] [--depth 4] [--fastest] [--json FILE]

The disk store is held against fio: same file system, same block size, same depth (fio's jobs, our threads
and concurrent calls), same mode, in the same run, round by round in turns, so that a change of the
machine's load hits both. A line gives medians over the rounds; *ratio* is store / fio of each round. On a
machine that others keep busy, ``--fastest`` compares the fastest round of each instead.

==========  ==========================================================================================
write       through the page cache, never synced: bound by copying, not by the device
read warm   from the page cache, in random order
read cold   through the page cache, after the files were synced and dropped from it, in random order
write O     O_DIRECT (``direct=True``): to the device
read O      O_DIRECT, in random order
==========  ==========================================================================================

*GB/s* is of payload, in batches as the transfer engine makes them, up to 16 MiB: of 64 pages, four at a time, when
reading; of 256 pages, one after the other, when writing.  Latencies are
of calls with one page each, ``depth`` at a time, from call to answer, checksum included; fio's are of its
system calls. fio computes no checksum; ``--checksum`` shows what ours costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hicache.tiers.disk import DiskStore
from hicache.tiers.framing import payload_checksum
from hicache.tiers.store import PageTarget, Store, StoredPage
from hicache.transfer.store_io import FETCH_CONCURRENCY, GET_PAGES, PUT_PAGES
from hicache.types import PageKey

PAGE_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
BATCH_BYTES = 16 << 20
LATENCY_PAGES = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: payload bytes a second, and percentiles of one page in microseconds."""

    bytes_per_s: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Line:
    """Medians over the rounds of one operation at one page size."""

    operation: str
    page_bytes: int
    reference: Figures
    store: Figures
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("stores", nargs="*", choices=[[], *MEASURES], help="which stores; default: all")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the file system to test")
    parser.add_argument("--mib", type=int, default=256, help="payload that a run moves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fastest", action="store_true", help="compare the fastest rounds, not the median")
    parser.add_argument("--depth", type=int, default=4, help="threads, jobs, concurrent calls")
    parser.add_argument(
        "--pages", type=int, nargs="*", default=list(PAGE_BYTES), help="payload bytes of a page"
    )
    parser.add_argument("--checksum", action="store_true", help="only show what a checksum costs")
    parser.add_argument("--json", help="write all lines to a file")
    arguments = parser.parse_args()
    for page_bytes in arguments.pages:
        print(
            f"checksum of {page_bytes >> 10:5} KiB: {checksum_speed(page_bytes) / 1e9:6.2f} GB/s, one thread"
        )
    if arguments.checksum:
        return
    way = "fastest" if arguments.fastest else "median"
    print(
        f"{arguments.mib} MiB a run, depth {arguments.depth}, {way} of {arguments.rounds} rounds; latencies in us"
    )
    print("store  operation    KiB   ref GB/s  store GB/s  ratio    ref p50    ref p99  store p50  store p99")
    lines: list[dict[str, object]] = []
    for name in arguments.stores or MEASURES:
        for line in MEASURES[name](arguments):
            print(
                f"{name:5}  {line.operation:9}  {line.page_bytes >> 10:5}  {line.reference.bytes_per_s / 1e9:9.2f}  "
                f"{line.store.bytes_per_s / 1e9:10.2f}  {line.ratio:5.2f}  {line.reference.p50_us:9.0f}  "
                f"{line.reference.p99_us:9.0f}  {line.store.p50_us:9.0f}  {line.store.p99_us:9.0f}",
                flush=True,
            )
            lines.append({"store": name} | asdict(line))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(lines, indent=1))


# ---- any store ---------------------------------------------------------------------------------------------------


class Load:
    """Pages of one size, and a store that they go through.

    Args:
        store: open, and empty at first.
        num_bytes: payload of all pages together.
        depth: concurrent calls when single pages are timed.
    """

    def __init__(self, store: Store, page_bytes: int, num_bytes: int, depth: int) -> None:
        self._store = store
        self._depth = depth
        self._page_bytes = page_bytes
        num_pages = max(depth, num_bytes // page_bytes)
        source = np.random.default_rng(0).integers(256, size=max(BATCH_BYTES, page_bytes), dtype=np.uint8)
        views = [
            memoryview(source)[start : start + page_bytes]
            for start in range(0, len(source) - page_bytes + 1, page_bytes)
        ]
        self._pages = [
            StoredPage(PageKey(random.Random(n).randbytes(32)), None, "full", views[n % len(views)])
            for n in range(num_pages)
        ]
        fit = max(1, BATCH_BYTES // page_bytes)
        self._put_step, self._get_step = min(PUT_PAGES, fit), min(GET_PAGES, fit)
        self._into = [
            memoryview(np.ones(self._get_step * page_bytes, dtype=np.uint8)) for _ in range(FETCH_CONCURRENCY)
        ]
        self._own_into = [memoryview(np.ones(page_bytes, dtype=np.uint8)) for _ in range(depth)]

    async def write(self) -> Figures:
        """Put all pages in batches, then some again one by one."""
        await self._store.clear()
        await self._write_singly(warm_up=True)
        await self._store.clear()
        began = time.perf_counter()
        for batch in self._batches(self._pages, self._put_step):
            assert all(await self._store.put(batch))
        seconds = time.perf_counter() - began
        await self._store.clear()
        times = await self._write_singly()
        await self._store.clear()
        for batch in self._batches(self._pages, self._put_step):
            assert all(await self._store.put(batch))
        return self._figures(seconds, times)

    async def read(self, prepare: Callable[[], None]) -> Figures:
        """Get all pages in random order in batches, then some one by one; ``prepare`` before each."""
        order = random.Random(1).sample(self._pages, len(self._pages))
        prepare()
        batches = self._batches(order, self._get_step)

        async def fetch(into: memoryview) -> None:
            for batch in batches:
                assert all(await self._store.get(self._targets(batch, into)))

        began = time.perf_counter()
        await asyncio.gather(*(fetch(into) for into in self._into))
        seconds = time.perf_counter() - began
        prepare()
        return self._figures(seconds, await self._singly(order, self._get))

    async def _write_singly(self, *, warm_up: bool = False) -> list[float]:
        return await self._singly(self._pages[: 8 if warm_up else None], self._put)

    async def _put(self, page: StoredPage, caller: int) -> bool:
        return (await self._store.put([page]))[0]

    async def _get(self, page: StoredPage, caller: int) -> bool:
        return (await self._store.get([PageTarget(page.key, "full", self._own_into[caller])]))[0]

    async def _singly(
        self, pages: Sequence[StoredPage], call: Callable[[StoredPage, int], object]
    ) -> list[float]:
        """One page a call, ``depth`` callers at a time; seconds of each call."""
        waiting = list(pages[:LATENCY_PAGES])
        times: list[float] = []

        async def caller(number: int) -> None:
            while waiting:
                page = waiting.pop()
                began = time.perf_counter()
                assert await call(page, number)  # type: ignore[misc]  # a coroutine function
                times.append(time.perf_counter() - began)

        await asyncio.gather(*(caller(number) for number in range(self._depth)))
        return times

    def _batches(self, pages: Sequence[StoredPage], step: int) -> Iterator[Sequence[StoredPage]]:
        return (pages[begin : begin + step] for begin in range(0, len(pages), step))

    def _targets(self, batch: Sequence[StoredPage], into: memoryview) -> list[PageTarget]:
        size = self._page_bytes
        return [PageTarget(page.key, "full", into[n * size : (n + 1) * size]) for n, page in enumerate(batch)]

    def _figures(self, seconds: float, times: list[float]) -> Figures:
        times = sorted(times)
        p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
        return Figures(len(self._pages) * self._page_bytes / seconds, p50 * 1e6, p99 * 1e6)


def summary(
    operation: str, page_bytes: int, rounds: Sequence[tuple[Figures, Figures]], *, fastest: bool
) -> Line:
    """Medians of (reference, store) over the rounds, or the fastest of each."""
    if fastest:
        reference, store = (
            max((figures[which] for figures in rounds), key=lambda figures: figures.bytes_per_s)
            for which in (0, 1)
        )
        return Line(operation, page_bytes, reference, store, store.bytes_per_s / reference.bytes_per_s)

    def median(which: int) -> Figures:
        return Figures(
            *(
                statistics.median(getattr(figures[which], name) for figures in rounds)
                for name in ("bytes_per_s", "p50_us", "p99_us")
            )
        )

    ratio = statistics.median(store.bytes_per_s / reference.bytes_per_s for reference, store in rounds)
    return Line(operation, page_bytes, median(0), median(1), ratio)


def checksum_speed(page_bytes: int) -> float:
    """Bytes a second of the checksum of pages of that size, in one thread."""
    payload = memoryview(np.random.default_rng(0).integers(256, size=64 << 20, dtype=np.uint8))
    began = time.perf_counter()
    for start in range(0, len(payload), page_bytes):
        payload_checksum(payload[start : start + page_bytes])
    return len(payload) / (time.perf_counter() - began)


# ---- disk, against fio -----------------------------------------------------------------------------------------------


def measure_disk(arguments: argparse.Namespace) -> Iterator[Line]:
    """Lines of the disk store."""
    if shutil.which("fio") is None:
        sys.exit("benchmarks/stores.py: the disk store is held against fio; install it (apt install fio)")
    for page_bytes in arguments.pages:
        found: dict[str, list[tuple[Figures, Figures]]] = {}
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory(dir=arguments.path, prefix="hicache-bench-") as folder:
                for operation, pair in asyncio.run(disk_round(Path(folder), page_bytes, arguments)).items():
                    found.setdefault(operation, []).append(pair)
        for operation, pairs in found.items():
            yield summary(operation, page_bytes, pairs, fastest=arguments.fastest)


async def disk_round(
    folder: Path, page_bytes: int, arguments: argparse.Namespace
) -> dict[str, tuple[Figures, Figures]]:
    """Every operation once: fio, then the store."""
    num_bytes, depth = arguments.mib << 20, arguments.depth
    found = {}
    for direct, mark in ((False, ""), (True, " O")):
        fio = Fio(folder / "fio", page_bytes, num_bytes, depth, direct=direct)
        store = DiskStore(folder / "store", num_threads=depth, direct=direct)
        await store.open()
        load = Load(store, page_bytes, num_bytes, depth)
        found[f"write{mark}"] = (fio.run("write"), await load.write())
        if not direct:
            found["read warm"] = (fio.run("randread", keep_cache=True), await load.read(lambda: None))
        drop = Dropper(folder)
        name = "read O" if direct else "read cold"
        drop()
        found[name] = (fio.run("randread"), await load.read(drop))
        await store.close()
        shutil.rmtree(folder / "store")
        shutil.rmtree(folder / "fio")
    return found


class Dropper:
    """Writes a folder's files to the device and drops them from the page cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> None:
        for path in self._folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


class Fio:
    """fio with ``depth`` threads, each with a file of its own and one system call at a time."""

    def __init__(self, folder: Path, block_bytes: int, num_bytes: int, depth: int, *, direct: bool) -> None:
        folder.mkdir(exist_ok=True)
        size = max(1, num_bytes // block_bytes // depth) * block_bytes
        self._command = [
            "fio", "--name=page", f"--directory={folder}", f"--bs={block_bytes}", f"--size={size}",
            "--ioengine=psync", "--thread", f"--numjobs={depth}", "--group_reporting", "--fallocate=none",
            f"--direct={int(direct)}", "--randseed=1", "--output-format=json",
        ]  # fmt: skip

    def run(self, pattern: str, *, keep_cache: bool = False) -> Figures:
        """One run over all blocks. ``keep_cache``: do not drop the files from the page cache before."""
        command = [*self._command, f"--rw={pattern}", f"--invalidate={int(not keep_cache)}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        part = job["write" if pattern == "write" else "read"]
        percentiles = part["clat_ns"]["percentile"]
        seconds = part["runtime"] / 1e3
        return Figures(
            part["io_bytes"] / max(seconds, 1e-3),
            percentiles["50.000000"] / 1e3,
            percentiles["99.000000"] / 1e3,
        )


Measure = Callable[[argparse.Namespace], Iterator[Line]]
MEASURES: dict[str, Measure] = {"disk": measure_disk}
"""By the name of a store: what yields its lines. One more store is one more entry."""


if __name__ == "__main__":
    main()
